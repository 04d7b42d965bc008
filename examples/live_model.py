"""A model that fits on a screen: a trainer and a generator of it shard it in their own ways."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, parallel

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
