"""A training step on shards under torch.compile(fullgraph=True), checked against plain PyTorch.

One process plays the ranks of a SwiGLU layer under tensor parallelism. Each rank's shard of the fused weight (w1 above
w3) is two boxes; `pack_shards` takes it out, differentiably. All weights are then updated in one flat buffer.

python examples/ops_in_compiled_code.py
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from outcome import LOSS_TOLERANCE, Outcome, largest_difference
from tiny_llama import DIM, FFN_DIM
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

NUM_RANKS, NUM_STEPS, BATCH, LEARNING_RATE = 4, 8, 32, 0.5


def shards_of(rank: int) -> list[LocalShard]:
    """Of the fused weight and of the down projection; the 171 FFN rows are uneven on 4 ranks."""
    begin, end = FFN_DIM * rank // NUM_RANKS, FFN_DIM * (rank + 1) // NUM_RANKS
    rows = end - begin
    gate_and_up = (Chunk((begin, 0), (rows, DIM), (0, 0)), Chunk((FFN_DIM + begin, 0), (rows, DIM), (rows, 0)))
    return [
        LocalShard((2 * rows, DIM), gate_and_up),
        LocalShard((DIM, rows), (Chunk((0, begin), (DIM, rows), (0, 0)),)),
    ]


def feed_forward(fused: Tensor, down: Tensor, x: Tensor) -> Tensor:
    gate, up = F.linear(x, fused).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def loss_on_shards(weights: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    outputs = [feed_forward(*ops.pack_shards(weights, shards_of(rank)), x) for rank in range(NUM_RANKS)]
    return F.mse_loss(torch.stack(outputs).sum(0), target)  # the sum is tensor parallelism's all-reduce


def update_flat(weights: list[Tensor], gradients: list[Tensor]) -> None:
    flat, gradient = (ops.flatten_tensors(each, alignment=4, dtype=torch.float32) for each in (weights, gradients))
    clipped = gradient / gradient.norm().clamp(min=1.0)
    ops.unflatten_tensors_(weights, flat - LEARNING_RATE * clipped, alignment=4)


def plain_loss(weights: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(feed_forward(*weights, x), target)


def plain_update(weights: list[Tensor], gradients: list[Tensor]) -> None:
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().clamp(min=1.0)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight -= LEARNING_RATE * gradient / norm


def train(name: str, loss_of: Callable[..., Tensor], update: Callable[..., None]) -> Outcome:
    torch.manual_seed(0)
    weights = [torch.randn(2 * FFN_DIM, DIM) / DIM**0.5, torch.randn(DIM, FFN_DIM) / FFN_DIM**0.5]
    x, target = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    losses = []
    for _ in range(NUM_STEPS):
        loss = loss_of([weight.requires_grad_() for weight in weights], x, target)
        with torch.no_grad():
            update(weights, list(torch.autograd.grad(loss, weights)))
        losses.append(loss.item())
    return Outcome(name, {}, losses)


def main() -> int:
    plain = train("plain PyTorch", plain_loss, plain_update)
    compiled = [torch.compile(function, fullgraph=True) for function in (loss_on_shards, update_flat)]
    ours = train("shards, compiled", *compiled)
    for outcome in (plain, ours):
        print(f"{outcome.mesh:18}", " ".join(f"{loss:.4f}" for loss in outcome.losses))
    difference = largest_difference(plain, ours)
    print(f"largest difference {difference:.0e}; {NUM_RANKS} ranks, one graph each for forward, backward and update")
    return 0 if difference <= LOSS_TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
