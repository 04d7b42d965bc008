"""A trainer and a generator that were started apart: the generator gets the trainer's weights each step.

torchrun --nproc-per-node 2 examples/two_jobs.py trainer &
torchrun --nproc-per-node 1 --master-port 29501 examples/two_jobs.py generator"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte
from torchtitan_ext import transfer
from torchtitan_ext.errors import LostRankError

JOBS, ADDRESS, STEPS = {"trainer": 2, "generator": 1}, os.environ.get("MEETING", "127.0.0.1:29600"), 10


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(32.0).view(2, 16) / 32)


def work(job: str) -> None:
    is_trainer = job == "trainer"
    model, logits, step = build_model(), torch.zeros(2, 4), 0
    if is_trainer:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (JOBS[job],)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    while step < STEPS:
        try:
            # A rank may have seen the end of a run that failed on others of its job.
            agreed = torch.tensor(step)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            step = int(agreed)
            group = transfer.meet(ADDRESS, job=job, rank=dist.get_rank(), jobs=JOBS)
            # The generator's model is plain: each of its ranks gets whole tensors. The logits travel along.
            state = {"model": model.state_dict(), "logits": logits}
            plan = tte.transfer.plan_reshard(
                *((state, None) if is_trainer else (None, state)), group, timeout_seconds=10
            )
            while step < STEPS:
                if is_trainer:
                    optimizer.zero_grad()
                    model(torch.randn(8, 16)).square().mean().backward()
                    optimizer.step()
                    logits.copy_(logits_of(model))
                step = plan.run(version=step + 1 if is_trainer else None).version
                time.sleep(0.2)  # the rest of a step
                if not is_trainer:
                    assert torch.allclose(logits_of(model), logits, atol=1e-6)
                    print(f"version {step}: the generator has the trainer's logits", flush=True)
        except LostRankError as error:
            print(f"{job}: {error.reason.split(';')[-2].strip()}; meeting again", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(sys.argv[1])
    dist.destroy_process_group()
