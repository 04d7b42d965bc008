"""`ops.exchange_runs_`: boxes of every dtype, shape and stride arrive bit for bit; or all raise, and nothing moves."""

import os
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from states import DTYPES, bits, random_tensor
from torch import Tensor

from torchtitan_ext import ops

SOAK = int(os.environ.get("TTE_SOAK", "1"))
BUCKETS = [1, 200, 1000, 4096, 1 << 16, ops.DEFAULT_BUCKET_BYTES]
Box = tuple[list[int], list[int]]
"""Offsets and sizes."""


@dataclass
class Move:
    """A box of a source tensor of one rank that goes to a box of a target tensor of another."""

    src_rank: int
    dst_rank: int
    src_tensor: int
    src_box: Box
    dst_tensor: int
    dst_box: Box
    dtype: torch.dtype | None = None


@dataclass
class Exchange:
    """What all ranks have, and what moves."""

    sources: list[list[Tensor]]
    targets: list[list[Tensor]]
    moves: list[Move]

    def table(self, rank: int, *, sent: bool) -> Tensor:
        """The boxes that a rank sends or receives."""
        table: list[int] = []
        own = [move for move in self.moves if (move.src_rank if sent else move.dst_rank) == rank]
        for move in sorted(own, key=lambda move: move.dst_rank if sent else move.src_rank):  # stable
            offsets, sizes = move.src_box if sent else move.dst_box
            peer, tensor = (move.dst_rank, move.src_tensor) if sent else (move.src_rank, move.dst_tensor)
            number = -1 if move.dtype is None or not sent else ops.dtype_number(move.dtype)
            table += [peer, tensor, number, len(sizes), *offsets, *sizes]
        return torch.tensor(table, dtype=torch.int64)

    def run(self, rank: int, **options: object) -> None:
        name = options.pop("group_name", dist.group.WORLD.group_name)
        sends, receives = self.table(rank, sent=True), self.table(rank, sent=False)
        ops.exchange_runs_(self.sources[rank], self.targets[rank], sends, receives, group_name=name, **options)

    def expected(self, rank: int) -> list[Tensor]:
        """By one assignment after the other."""
        targets = [target.clone() for target in self.targets[rank]]
        for move in self.moves:
            if move.dst_rank != rank:
                continue
            target = part_of(targets[move.dst_tensor], move.dst_box)
            source = part_of(self.sources[move.src_rank][move.src_tensor], move.src_box)
            source = source if move.dtype is None else source.to(move.dtype)
            as_bits = BITS[target.dtype.itemsize]
            target.view(as_bits).copy_(bits(source).view(as_bits).view(target.shape))
        return targets


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes whose copies keep all bits."""


def part_of(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


CASTS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


def random_strided(generator: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Contiguous, transposed, or every second element of a larger tensor."""
    steps = [generator.choice([1, 1, 1, 2]) for _ in shape]
    order = list(range(len(shape)))
    if generator.random() < 0.5:
        generator.shuffle(order)
    larger = [shape[dim] * steps[dim] + generator.choice([0, 0, 3]) for dim in order]
    tensor = random_tensor(tuple(larger), dtype, generator.randrange(1 << 30))
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    for dim, (size, step) in enumerate(zip(shape, steps, strict=True)):
        tensor = tensor[(slice(None),) * dim + (slice(0, size * step, step),)]
    assert list(tensor.shape) == shape
    return tensor


def random_box(generator: random.Random, sizes: list[int]) -> tuple[list[int], Box]:
    """A tensor's shape and a box of it."""
    offsets = [generator.choice([0, 0, 2]) for _ in sizes]
    behind = [generator.choice([0, 0, 1]) for _ in sizes]
    return [sum(parts) for parts in zip(offsets, sizes, behind, strict=True)], (offsets, sizes)


def random_exchange(seed: int, world_size: int, largest: int = 9) -> Exchange:
    """Each target is cut into slabs along a dim; each of them comes from a tensor of its own on some rank, or stays."""
    generator = random.Random(seed)
    exchange = Exchange([[] for _ in range(world_size)], [[] for _ in range(world_size)], [])
    active = generator.sample(range(world_size), generator.randint(1, world_size))
    for dst_rank in active:
        for _ in range(generator.randint(0, 8)):
            add_target(generator, exchange, dst_rank, generator.choices(range(world_size), k=4), largest)
    return exchange


def add_target(generator: random.Random, exchange: Exchange, dst_rank: int, src_ranks: list[int], largest: int) -> None:
    shape = [generator.choice([0, 1, 2, 3, 5, largest, largest]) for _ in range(generator.randint(0, 4))]
    is_cast = generator.random() < 0.3
    dtype = generator.choice(CASTS if is_cast else DTYPES)
    exchange.targets[dst_rank].append(random_strided(generator, shape, dtype))
    dim = generator.randrange(len(shape)) if shape else 0
    cuts = sorted(generator.randint(0, shape[dim]) for _ in range(3)) if shape else []
    ends = [0, *cuts, shape[dim]] if shape else [0, 1]
    for src_rank, begin, end in zip(src_ranks, ends, ends[1:], strict=False):
        if generator.random() < 0.2:
            continue  # stays as it is
        offsets = [begin if index == dim else 0 for index in range(len(shape))]
        sizes = [end - begin if index == dim else size for index, size in enumerate(shape)]
        # Another shape with as many elements, where a rank does not copy its own.
        flat = [torch.Size(sizes).numel()]
        src_shape, src_box = random_box(generator, flat if src_rank != dst_rank and generator.random() < 0.3 else sizes)
        src_dtype = torch.float32 if is_cast else dtype
        source = random_strided(generator, src_shape, src_dtype)
        if is_cast:  # numbers that every dtype can hold
            source.copy_(torch.rand(src_shape) * 5)
        if generator.random() < 0.1 and source.dim() > 0:
            source = source.narrow(0, 0, min(1, source.shape[0])).expand_as(source)
        exchange.sources[src_rank].append(source)
        exchange.moves.append(
            Move(
                src_rank,
                dst_rank,
                len(exchange.sources[src_rank]) - 1,
                src_box,
                len(exchange.targets[dst_rank]) - 1,
                (offsets, sizes),
                dtype if is_cast else None,
            )
        )


def exchange_random(rank: int, world_size: int, seeds: range) -> list[str]:
    wrong = []
    for seed in seeds:
        exchange = random_exchange(seed, world_size)
        expected = exchange.expected(rank)
        versions = [target._version for target in exchange.targets[rank]]
        exchange.run(rank, bucket_bytes=BUCKETS[seed % len(BUCKETS)], digest=seed)
        targets = exchange.targets[rank]
        assert all(target._version > before for target, before in zip(targets, versions, strict=True))
        wrong += [
            f"seed {seed}, rank {rank}: {target.dtype} {tuple(target.shape)}"
            for target, want in zip(targets, expected, strict=True)
            if not torch.equal(bits(target), bits(want))
        ]
    return wrong


def test_random_boxes(run_world) -> None:
    for world_size in (1, 2, 3, 5):
        seeds = range(100 * world_size, 100 * world_size + 60 * SOAK)
        assert run_world(world_size, exchange_random, seeds) == [[]] * world_size
