"""FSDP2 from the first save to a resume on other ranks; docs/use/tutorial.md goes through it.

torchrun --nproc-per-node 2 examples/first_hour.py run; torchrun --nproc-per-node 3 examples/first_hour.py run"""

import sys
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, TrainState

STEPS = 4  # of one job
VOCABULARY = 1003  # a prime: no number of ranks divides it


def train(run: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Tanh(), nn.Linear(64, VOCABULARY)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(96) % 8 * 100  # eight of them, whose next but one is to be learned
    loader = ElasticDataLoader(tokens, global_batch_size=12, dp_rank=dist.get_rank(), dp_size=mesh.size())
    train_state = TrainState()

    objects = {"model": model, "optimizer": optimizer, "dataloader": loader, "train_state": train_state}
    manager = tte.CheckpointManager(run, keep=3, **objects)
    if manager.resume():  # 0 where the run has no step yet
        show(str(manager.report))

    for batch in islice(loader, STEPS):
        inputs = batch.to(device)
        loss = nn.functional.cross_entropy(model(inputs), (inputs + 2) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train_state.advance(samples=loader.global_batch_size)
        dist.all_reduce(total := loss.detach() / mesh.size())
        show(f"step {train_state.step}: loss {total:.4f}")

    manager.save(step=train_state.step)
    manager.close()  # waits until it is committed
    show(f"saved step {train_state.step} of {manager.steps()}")


def show(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    train(sys.argv[1])
    dist.barrier()  # lets gloo's threads release their tensors before Python ends (docs/use/adoption.md)
    dist.destroy_process_group()
