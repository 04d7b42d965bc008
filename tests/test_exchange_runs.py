"""`ops.exchange_runs_`: boxes of every dtype, shape and stride arrive bit for bit; or all raise, and nothing moves."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lost_worlds import DEADLINE_SECONDS, let_go_on, strike_later
from python_group import PythonGroup, register
from states import DTYPES, bits, random_tensor
from tier import num_cases
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from torchtitan_ext import ops

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
        sends, receives = self.table(rank, sent=True), self.table(rank, sent=False)
        options.setdefault("group_name", dist.group.WORLD and dist.group.WORLD.group_name)
        ops.exchange_runs_(self.sources[rank], self.targets[rank], sends, receives, **options)

    def planned(self, rank: int, **options: object) -> ops.PlannedExchange:
        sends, receives = self.table(rank, sent=True), self.table(rank, sent=False)
        options.setdefault("group_name", dist.group.WORLD and dist.group.WORLD.group_name)
        return ops.PlannedExchange(self.sources[rank], self.targets[rank], sends, receives, **options)

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
        seeds = range(100 * world_size, 100 * world_size + num_cases(60))
        assert run_world(world_size, exchange_random, seeds) == [[]] * world_size


def test_boxes_of_one_rank_without_a_group() -> None:
    for seed in range(num_cases(40)):
        exchange = random_exchange(seed, 1)
        expected = exchange.expected(0)
        exchange.run(0, group_name="", digest=seed)
        assert all(torch.equal(bits(got), bits(want)) for got, want in zip(exchange.targets[0], expected, strict=True))
        planned = exchange.planned(0, group_name="")
        for _ in range(2):
            for target in exchange.targets[0]:
                target.zero_()
            expected = exchange.expected(0)
            planned.run()
            assert all(
                torch.equal(bits(got), bits(want)) for got, want in zip(exchange.targets[0], expected, strict=True)
            )


def run_planned(rank: int, world_size: int, seeds: range) -> int:
    num_right = 0
    for seed in seeds:
        exchange = random_exchange(seed, world_size)
        planned = exchange.planned(rank, bucket_bytes=BUCKETS[seed % len(BUCKETS)])
        for run in range(3):
            for number, tensors in enumerate((*exchange.sources, *exchange.targets)):  # other values on all ranks
                for tensor in (tensor for tensor in tensors if not torch._debug_has_internal_overlap(tensor)):
                    random = random_tensor(tuple(tensor.shape), tensor.dtype, 100 * run + number)
                    tensor.view(BITS[tensor.itemsize]).copy_(random.view(BITS[tensor.itemsize]))
            expected = exchange.expected(rank)
            targets = exchange.targets[rank]
            versions = [target._version for target in targets]
            planned.run(digest=seed + run)
            assert all(target._version > before for target, before in zip(targets, versions, strict=True))
            assert all(torch.equal(bits(got), bits(want)) for got, want in zip(targets, expected, strict=True))
            num_right += 1
    return num_right


def test_a_planned_exchange_sends_what_the_tensors_hold_when_it_runs(run_world) -> None:
    for world_size in (1, 2, 3):
        seeds = range(1000 * world_size, 1000 * world_size + num_cases(12))
        assert run_world(world_size, run_planned, seeds) == [3 * len(seeds)] * world_size


def refuse_planned(rank: int, world_size: int) -> list[str]:
    told = []
    exchange = one_row(world_size)
    planned = exchange.planned(rank)
    if rank == 1:
        exchange.sources[1] = exchange.targets[1]
    refused = exchange.planned(rank)  # raises nothing yet: the other ranks would wait
    for one, digest in ((refused, 0), (planned, rank), (planned, ops.exchange.REFUSED if rank == 0 else 0)):
        with pytest.raises(ValueError) as caught:
            one.run(digest=digest)
        told.append(str(caught.value).removeprefix("exchange_runs_: "))
    planned.run()
    del planned, refused
    return [*told, *map(str, exchange.targets[rank][0].tolist())]


def test_what_is_wrong_with_a_planned_exchange_is_raised_by_its_run_on_all_ranks(run_world) -> None:
    first, second = run_world(2, refuse_planned)
    elsewhere = "refused by rank(s) {}, where an error says why; nothing was moved"
    assert first[0] == elsewhere.format(1)
    assert second[0] == "targets[0] and sources[0] share memory; clone() one of them first"
    assert first[1] == second[1] and "another digest than most ranks" in first[1]
    assert (first[2], second[2]) == ("refused by this rank's caller", elsewhere.format(0))
    assert (first[3:], second[3:]) == (["1.0"] * 4, ["0.0"] * 4)


def refuse_tensors_of_one_rank(rank: int, world_size: int) -> list[list[str]]:
    """What rank 1 alone gives is wrong."""
    told = []
    for side, wrong in [
        ("sources", TwoTensor(torch.ones(4), torch.ones(4))),
        ("targets", TwoTensor(torch.ones(4), torch.ones(4))),
        ("targets", torch.zeros(4, requires_grad=True)),
        ("sources", torch.ones(4, dtype=torch.complex64).conj()),
    ]:
        exchange = one_row(world_size)
        if rank == 1:
            getattr(exchange, side)[1] = [wrong]
        with pytest.raises((ValueError, RuntimeError)) as caught:
            exchange.planned(rank).run()
        told.append(str(caught.value).removeprefix("exchange_runs_"))
        with torch.no_grad():
            assert rank == 1 or exchange.targets[rank][0].tolist() == [-1.0] * 4
    return told


def test_a_planned_exchange_of_other_tensors_is_refused_on_all_ranks(run_world) -> None:
    first, second = run_world(2, refuse_tensors_of_one_rank)
    assert first == [": refused by rank(s) 1, where an error says why; nothing was moved"] * 4
    subclass = " is of a subclass; pass the rank's own plain tensor"
    assert second[:2] == [f": {side}[0]{subclass}" for side in ("sources", "targets")]
    assert second[2] == " is not differentiable: an argument requires grad; call it under torch.no_grad()"
    assert second[3] == ": sources[0] is a lazily conjugated or negated view; pass what it views"


def large_exchange(world_size: int) -> Exchange:
    """Boxes of several messages, packed on one end or on both or on none, and small ones between them."""
    exchange = Exchange([], [], [])
    for rank in range(world_size):
        exchange.sources.append([random_tensor((700, 900), torch.float32, 10 * rank + part) for part in range(3)])
        exchange.targets.append([torch.zeros(world_size * 200, 900), torch.zeros(900, world_size * 200).t()])
    for dst_rank in range(world_size):
        for src_rank in range(world_size):
            for tensor in range(2):
                rows, columns = [200 * src_rank, 0], [100 * dst_rank, 0]
                box, small = ([200, 899], [200, 1])
                exchange.moves.append(Move(src_rank, dst_rank, tensor, (columns, box), tensor, (rows, box)))
                last = [rows[0], 899], small
                exchange.moves.append(Move(src_rank, dst_rank, 2, ([columns[0], 5], small), tensor, last))
    return exchange


def exchange_large(rank: int, world_size: int) -> bool:
    exchange = large_exchange(world_size)
    expected = exchange.expected(rank)
    for bucket_bytes in (ops.DEFAULT_BUCKET_BYTES, 100_000, 1 << 60):
        for target in exchange.targets[rank]:
            target.zero_()
        exchange.run(rank, bucket_bytes=bucket_bytes)
        if not all(
            torch.equal(bits(got), bits(want)) for got, want in zip(exchange.targets[rank], expected, strict=True)
        ):
            return False
    return True


def test_large_boxes(run_world) -> None:
    assert run_world(3, exchange_large) == [True] * 3


def one_row(world_size: int) -> Exchange:
    """Every rank sends a row of four to the next one."""
    ranks = range(world_size)
    row = ([0], [4])
    return Exchange(
        [[torch.full((4,), float(rank))] for rank in ranks],
        [[torch.full((4,), -1.0)] for _ in ranks],
        [Move(rank, (rank + 1) % world_size, 0, row, 0, row) for rank in ranks],
    )


def compiled(rank: int, world_size: int) -> list[float]:
    exchange, name = one_row(world_size), dist.group.WORLD.group_name
    tables = exchange.table(rank, sent=True), exchange.table(rank, sent=False)
    # The schema and the fake kernel; gradients are refused by design.
    for utility in ("test_schema", "test_faketensor"):
        torch.library.opcheck(
            torch.ops.torchtitan_ext.exchange_runs_.default,
            (exchange.sources[rank], exchange.targets[rank], *tables, name, 0, 1 << 20, 0.0),
            test_utils=utility,
        )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(sources: list[Tensor], targets: list[Tensor], sends: Tensor, receives: Tensor) -> Tensor:
        ops.exchange_runs_(sources, targets, sends, receives, group_name=name, timeout_seconds=100)
        return targets[0] * 2

    exchange.targets[rank][0].fill_(-1)
    result = step(exchange.sources[rank], exchange.targets[rank], *tables)
    return [*result.tolist(), float(exchange.targets[rank][0][3])]


def test_opcheck_and_compile(run_world) -> None:
    assert run_world(2, compiled) == [[2.0] * 4 + [1.0], [0.0] * 5]


def overwritten(rank: int, world_size: int) -> None:
    exchange = one_row(world_size)
    weight = torch.ones(4, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()
    exchange.targets[rank] = [hidden.detach()]
    exchange.run(rank)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        exchange.targets[rank] = [torch.zeros(4)]
    exchange.run(rank)
    assert exchange.targets[rank][0].tolist() == exchange.sources[rank - 1][0].tolist()


def test_autograd_notices(run_world) -> None:
    run_world(2, overwritten)


def refusal(exchange: Exchange, rank: int, **options: object) -> str:
    before = [target.detach().clone() for target in exchange.targets[rank] if type(target) is Tensor]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        exchange.run(rank, **options)
    after = [target for target in exchange.targets[rank] if type(target) is Tensor]
    for target, value in zip(after, before, strict=True):
        assert target.is_meta or target.is_sparse or torch.equal(target, value)
    return f"{type(caught.value).__name__}: {caught.value}"


REFUSED_BY_1 = "ValueError: exchange_runs_: refused by rank(s) 1, where an error says why; nothing was moved"


def refuse_arguments(rank: int, world_size: int) -> list[str]:
    """Rank 1 passes something wrong: an error on all ranks, and the next call works."""
    whole = torch.zeros(4, 4)
    cases: list[tuple[list[Tensor], list[Tensor], str]] = [
        ([torch.zeros(4)], [torch.zeros(4, requires_grad=True)], "not differentiable: an argument requires grad"),
        ([torch.zeros(4, requires_grad=True)], [torch.zeros(4)], "not differentiable: an argument requires grad"),
        ([torch.zeros(4)], [torch.zeros(1).expand(4)], "several of its elements share memory"),
        ([torch.zeros(4)], [torch.zeros(4, dtype=torch.complex64).conj()], "lazily conjugated"),
        ([torch.zeros(4)], [torch.zeros(4, device="meta")], "is on the meta device"),
        ([torch.zeros(4)], [torch.zeros(4).to_sparse()], "is sparse"),
        ([torch.zeros(4)], [torch.zeros(3)], "begins at 0 and has 4 of the 3 elements of dim 0"),
        ([torch.zeros(4)], [torch.zeros(2, 2)], "has 1 dims, its tensor has 2"),
        ([torch.zeros(4)], [], "is of tensor 0, expected a position in a list of 0"),
        ([whole[0]], [whole[0]], "targets[0] and sources[0] share memory"),
        ([torch.zeros(4)], [whole[0], whole[0, :2]], "targets[0] and targets[1] share memory"),
        (["weights"], [torch.zeros(4)], "got a str in sources, expected a tensor"),
        (torch.zeros(4), [torch.zeros(4)], "expected a list of tensors"),
    ]
    wrong = []
    for sources, targets, text in cases:
        exchange = one_row(world_size)
        if rank == 1:
            exchange.sources[1], exchange.targets[1] = sources, targets
        told = refusal(exchange, rank, timeout_seconds=60)
        if (text not in told) if rank == 1 else (told != REFUSED_BY_1):
            wrong.append(f"rank {rank}, {text!r}: {told}")
    exchange = one_row(world_size)
    for options, text in [
        ({"digest": -1}, "refused by this rank's caller"),
        ({"bucket_bytes": 0}, "got bucket_bytes 0, expected a positive number"),
    ]:
        told = refusal(exchange, rank, **(options if rank == 1 else {}))
        if (text not in told) if rank == 1 else (told != REFUSED_BY_1):
            wrong.append(f"rank {rank}, {text!r}: {told}")
    exchange.run(rank)
    assert exchange.targets[rank][0].tolist() == exchange.sources[rank - 1][0].tolist()
    return wrong


def test_what_one_rank_refuses_is_an_error_on_all(run_world) -> None:
    assert run_world(3, refuse_arguments) == [[]] * 3


def refuse_tables(rank: int, world_size: int) -> list[str]:
    name = dist.group.WORLD.group_name
    tensors = [torch.zeros(6)], [torch.zeros(6)]
    good = torch.empty(0, dtype=torch.int64)
    boxes = [rank, 0, -1, 1, 0, 4, rank, 0, -1, 1, 3, 3]
    int32 = boxes[:2] + [3] + boxes[3:6]
    wrong = []
    for sends, receives, text in [
        (torch.zeros(0), good, "sends is no 1-d contiguous int64 tensor on the CPU"),
        (good, torch.zeros(2, 6, dtype=torch.int64), "receives is no 1-d contiguous int64 tensor on the CPU"),
        (torch.tensor([5, 0, -1, 1, 0, 1]), good, "sends: box 0 has peer 5, expected a rank of the group, 0 to 0"),
        (torch.tensor(boxes), torch.tensor(boxes), "receives: boxes 0 and 1 share elements"),
        (torch.tensor(boxes), good, "this rank sends itself 2 boxes and expects 0"),
        (torch.tensor(boxes[:6]), torch.tensor(boxes[6:]), "box 0 that this rank sends itself has another shape"),
        (torch.tensor(int32), torch.tensor(int32), "receives: box 0 has dtype 3, expected -1: only a sender can cast"),
        (torch.tensor(boxes[:2] + [99] + boxes[3:]), good, "box 0 has dtype 99, expected -1 or that of elements"),
        (torch.tensor(boxes[:2] + [12] + boxes[3:]), good, "box 0 has dtype 12, expected -1 or that of elements"),
    ]:
        with pytest.raises(ValueError) as caught:
            ops.exchange_runs_(*tensors, sends, receives, group_name=name)
        if text not in str(caught.value):
            wrong.append(f"{text}: {caught.value}")
    with pytest.raises(RuntimeError, match="no such group"):
        ops.exchange_runs_([], [], good, good, group_name="no such group")
    ops.exchange_runs_([], [], good, good, group_name=name)
    return wrong


def test_refused_tables(run_world) -> None:
    assert run_world(1, refuse_tables) == [[]]


def test_numbers_of_dtypes() -> None:
    for dtype in (*DTYPES, torch.complex32):
        assert torch.ops.aten.empty.memory_format([1], dtype=ops.dtype_number(dtype)).dtype == dtype
    with pytest.raises(ValueError, match="got torch.qint8, expected a dtype to which torch converts"):
        ops.dtype_number(torch.qint8)


def disagree(rank: int, world_size: int) -> list[str]:
    told = []
    exchange = one_row(world_size)
    told.append(refusal(exchange, rank, digest=7 if rank == 2 else 5))
    told.append(refusal(exchange, rank, bucket_bytes=1 << (20 if rank == 1 else 21)))
    for row in (([0], [3]), ([0], [5])):
        exchange = one_row(world_size)
        if rank == 1:
            exchange.sources[1] = [torch.zeros(9)]
            exchange.moves[1].src_box = row
        told.append(refusal(exchange, rank))
    exchange = one_row(world_size)
    if rank == 0:  # wants nothing of what it gets
        exchange.moves[2].dst_rank = 1
    told.append(refusal(exchange, rank))
    return told


def test_disagreements_are_the_same_error_on_all(run_world) -> None:
    where = "ValueError: exchange_runs_: "
    unequal = where + "what is sent is not what is expected, from rank {}; nothing was moved"
    assert (
        run_world(3, disagree)
        == [
            [
                where + "rank(s) 2 have another digest than most ranks: they mean another exchange; nothing was moved",
                where + "rank(s) 1 have other bucket_bytes than most ranks; nothing was moved",
                unequal.format("1 to rank 2"),
                unequal.format("1 to rank 2"),
                unequal.format("2 to rank 0"),
            ]
        ]
        * 3
    )


def in_a_subgroup(rank: int, world_size: int) -> list[float]:
    group = dist.new_group([1, 3])
    exchange = one_row(2)
    if rank in (1, 3):
        exchange.run(group.rank(), group_name=group.group_name)
    return exchange.targets[rank // 2][0].tolist()


def test_peers_are_ranks_of_the_group(run_world) -> None:
    assert run_world(4, in_a_subgroup) == [[-1.0] * 4, [1.0] * 4, [-1.0] * 4, [0.0] * 4]


LOST_RANK = 1


def large_rows(world_size: int) -> Exchange:
    """Every rank sends 40 MB to the next one, from memory and to memory."""
    ranks = range(world_size)
    row = ([0], [10_000_000])
    return Exchange(
        [[torch.full((10_000_000,), float(rank))] for rank in ranks],
        [[torch.full((10_000_000,), -1.0)] for _ in ranks],
        [Move(rank, (rank + 1) % world_size, 0, row, 0, row) for rank in ranks],
    )


def exchange_until_lost(exchange: Exchange, rank: int, group: dist.ProcessGroup) -> str:
    """The error. Gloo notices a closed connection at once, one that is silent by the deadline."""
    while True:
        try:
            exchange.run(rank, group_name=group.group_name, timeout_seconds=DEADLINE_SECONDS)
        except dist.DistBackendError as error:
            return str(error)


def never_come(rank: int, world_size: int) -> str:
    group = dist.new_group()
    exchange = one_row(world_size)
    versions = [target._version for target in exchange.targets[rank]]
    if rank == LOST_RANK:
        return ""
    told = exchange_until_lost(exchange, rank, group)
    assert [target._version for target in exchange.targets[rank]] == versions
    return told.partition("nothing was moved")[0]


@pytest.mark.nightly("lost")
def test_a_rank_that_does_not_come(run_world) -> None:
    told = "exchange_runs_: while ranks compared what they exchange; "
    assert run_world(3, never_come) == [told, "", told]


def stop(rank: int, world_size: int) -> tuple[str, bool]:
    """Rank 1 is stopped in the middle of a transfer, and goes on when the others have given up."""
    group = dist.new_group()
    exchange = large_rows(world_size)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    store = dist.distributed_c10d._get_default_store()
    version = exchange.targets[rank][0]._version
    if rank == LOST_RANK:
        strike_later("stop")
    told = exchange_until_lost(exchange, rank, group)
    if rank == 2:
        store.set("rank 2 has given up", "")
    if rank == 0:
        store.get("rank 2 has given up")
        let_go_on(pids[LOST_RANK])
    return told.split(";")[0], exchange.targets[rank][0]._version > version


PHASES = {"exchange_runs_: while boxes moved", "exchange_runs_: while ranks compared what they exchange"}


@pytest.mark.nightly("lost")
def test_a_rank_that_is_stopped(run_world) -> None:
    for told, has_new_version in run_world(3, stop):
        assert told in PHASES
        assert has_new_version  # from the calls before, or by the failure


def die(rank: int, world_size: int, folder: str) -> None:
    """Survivors write down what they got: the world fails as a whole."""
    group = dist.new_group()
    exchange = large_rows(world_size)
    if rank == LOST_RANK:
        strike_later("kill")
    Path(folder, str(rank)).write_text(exchange_until_lost(exchange, rank, group))


@pytest.mark.nightly("lost")
def test_a_rank_that_dies(run_world, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, die, str(tmp_path))
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert texts.keys() == {0, 2}
    assert {text.split(";")[0] for text in texts.values()} <= PHASES


def through_a_python_group(rank: int, world_size: int) -> str:
    group = register(PythonGroup(dist.new_group()), "exchanging group")
    exchange = large_exchange(world_size)
    expected = exchange.expected(rank)
    exchange.run(rank, group_name="exchanging group")
    assert all(torch.equal(bits(got), bits(want)) for got, want in zip(exchange.targets[rank], expected, strict=True))
    group.calls_left = 1
    versions = [target._version for target in exchange.targets[rank]]
    with pytest.raises(dist.DistBackendError) as caught:
        exchange.run(rank, group_name="exchanging group", timeout_seconds=60)
    assert all(target._version > before for target, before in zip(exchange.targets[rank], versions, strict=True))
    return str(caught.value)


def test_a_transfer_that_fails_bumps_versions(run_world) -> None:
    told = "exchange_runs_: while boxes moved; targets may be part-written: RuntimeError: the network is gone"
    for text in run_world(2, through_a_python_group):
        assert text.startswith(told)


def on_gpu(rank: int, world_size: int) -> list[str]:
    """All ranks on one GPU, with gloo, by way of the host: NCCL wants one GPU each."""
    wrong = []
    for seed in range(20):
        exchange = random_exchange(seed, world_size, largest=40)
        expected = exchange.expected(rank)
        exchange.sources[rank] = [on_cuda(tensor) for tensor in exchange.sources[rank]]
        exchange.targets[rank] = [on_cuda(tensor) for tensor in exchange.targets[rank]]
        exchange.run(rank, bucket_bytes=BUCKETS[seed % len(BUCKETS)])
        wrong += [
            f"seed {seed}: {target.dtype} {tuple(target.shape)}"
            for target, want in zip(exchange.targets[rank], expected, strict=True)
            if not torch.equal(bits(target.cpu()), bits(want))
        ]
    return wrong


def on_cuda(tensor: Tensor) -> Tensor:
    """With the same strides."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@pytest.mark.needs_cuda
def test_random_boxes_on_a_gpu(run_world) -> None:
    assert run_world(2, on_gpu) == [[]] * 2


def with_nccl(rank: int, world_size: int) -> list[str]:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    exchange = large_exchange(world_size)
    expected = exchange.expected(rank)
    for tensors in exchange.sources[rank], exchange.targets[rank]:
        tensors[:] = [on_cuda(tensor) for tensor in tensors]
    exchange.run(rank, group_name=group.group_name, bucket_bytes=1 << 20)
    pairs = zip(exchange.targets[rank], expected, strict=True)
    return [f"{tuple(got.shape)}" for got, want in pairs if not torch.equal(bits(got.cpu()), bits(want))]


@pytest.mark.needs_cuda
def test_from_gpu_to_gpu(run_world) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    assert run_world(2, with_nccl) == [[]] * 2
