"""A trainer under FSDP2 fills a generator under tensor parallelism each step, in memory; both give the same logits.

torchrun --nproc-per-node 4 examples/reshard_live.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_model import TP_PLAN, VOCAB, build_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

import torchtitan_ext as tte

if __name__ == "__main__":
    mesh = dist.init_device_mesh("cpu", (4,))
    trainer, generator = build_model(), build_model()
    fully_shard(trainer, mesh=mesh)
    parallel.parallelize_module(generator, mesh, TP_PLAN)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    plan = tte.transfer.plan_reshard(trainer, generator)
    for step in (1, 2, 3):
        tokens = (7 * torch.arange(8 * 12).view(8, 12) + step) % VOCAB  # the same on all ranks
        own = tokens.chunk(mesh.size())[mesh.get_rank()]
        F.cross_entropy(trainer(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        result = plan.run(version=step)
        with torch.no_grad():
            difference = (trainer(tokens) - generator(tokens)).abs().max()
        if mesh.get_rank() == 0:
            print(f"version {result.version}: {result.bytes_received:,} bytes received, logits within {difference:.0e}")
    dist.barrier()  # lets gloo's threads release their tensors before Python ends (docs/use/adoption.md)
    dist.destroy_process_group()
