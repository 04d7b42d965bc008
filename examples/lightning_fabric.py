"""Lightning's Fabric over a vocabulary of 13 rows; what six processes (3 x 2) have saved, two or four go on with.
torchrun --nproc-per-node 6 examples/lightning_fabric.py /tmp/run; torchrun --nproc-per-node 2 ... /tmp/run"""

import os
import sys

try:
    from lightning import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchtitan_ext as tte


def parallelize(model, mesh):
    parallelize_module(model, mesh["tensor_parallel"], {"1": ColwiseParallel(output_layouts=Replicate())})
    return fully_shard(model, mesh=mesh["data_parallel"])


if __name__ == "__main__":
    tte.install()  # the one line: without it the save is refused, as 13 rows are uneven
    world_size, path = int(os.environ["WORLD_SIZE"]), sys.argv[1]
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=world_size // 2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    model = fabric.setup(nn.Sequential(nn.Embedding(13, 16), nn.Linear(16, 13)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if os.path.exists(path):
        fabric.load(path, state)
    for _ in range(3):
        state["step"] += 1
        loss = nn.functional.cross_entropy(model(torch.arange(13)), torch.arange(13).roll(1))
        fabric.backward(loss), optimizer.step(), optimizer.zero_grad()
        fabric.print(f"step {state['step']}: loss {loss:.4f}")
    fabric.save(path, state)
