"""accelerate with FSDP2: what four processes have saved, three go on with, over the same batches.

torchrun --nproc-per-node 4 examples/accelerate_fsdp2.py /tmp/run; torchrun --nproc-per-node 3 ... /tmp/run"""

import os
import sys

try:
    from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchtitan_ext as tte

if __name__ == "__main__":
    tte.install()  # the one line
    path = sys.argv[1]
    if not torch.cuda.is_available():  # accelerate has FSDP for GPUs only: let it take these processes for some
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"),
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # of 12 for any number of processes
    )
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
    inputs = torch.randn(72, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    start = 3 if os.path.exists(path) else 0
    if start:
        accelerator.load_state(path)
    batches = iter(accelerator.skip_first_batches(loader, start))
    for step in range(start + 1, start + 4):
        features, wanted = next(batches)
        loss = torch.nn.functional.mse_loss(model(features), wanted)
        accelerator.backward(loss)
        optimizer.step(), optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")
    accelerator.save_state(path)
