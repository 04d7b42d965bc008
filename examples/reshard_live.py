"""A trainer under FSDP2 fills a generator under tensor parallelism each step, in memory; both give the same logits.

torchrun --nproc-per-node 4 examples/reshard_live.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, parallel

import torchtitan_ext as tte

VOCAB, DIM, HEAD_DIM = 257, 32, 4  # 257 divides by no number of ranks
COLUMNS, OUTPUT = parallel.ColwiseParallel(), parallel.ColwiseParallel(output_layouts=Replicate())
TP_PLAN = {"1.wq": COLUMNS, "1.wk": COLUMNS, "1.wv": COLUMNS, "1.wo": parallel.RowwiseParallel(), "2": OUTPUT}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, DIM), Layer(), nn.Linear(DIM, VOCAB, bias=False))


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
