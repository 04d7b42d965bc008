"""A trainer and a generator that are started apart, in one process group: the generator gets the weights each step.

torchrun --nproc-per-node 2 examples/two_jobs.py trainer &
torchrun --nproc-per-node 1 --master-port 29501 examples/two_jobs.py generator"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

FIRST_RANK, WORLD_SIZE, STEPS = {"trainer": 0, "generator": 2}, 3, 3


def join_both(job: str) -> None:
    """Makes one default group of both jobs. Its first rank hosts the store where all find each other."""
    rank = FIRST_RANK[job] + int(os.environ["RANK"])
    host, port = os.environ.get("TWO_JOBS", "127.0.0.1:29600").split(":")
    store = dist.TCPStore(host, int(port), WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(32.0).view(2, 16) / 32)


def work(job: str) -> None:
    model, logits = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4)), torch.zeros(2, 4)
    trainers = DeviceMesh("cpu", [0, 1])  # groups of some ranks are made by all
    if job == "trainer":
        fully_shard(model, mesh=trainers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # The generator's model is plain: its rank gets whole tensors. The logits travel along.
    state = {"model": model.state_dict(), "logits": logits}
    for step in range(STEPS):
        if job == "trainer":
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            logits.copy_(logits_of(model))
            tte.reshard(state, None, version=step)
        else:
            tte.reshard(None, state)
            assert torch.allclose(logits_of(model), logits, atol=1e-6)
            print(f"step {step}: the generator has the trainer's logits", flush=True)


if __name__ == "__main__":
    join_both(sys.argv[1])
    work(sys.argv[1])
    dist.destroy_process_group()
