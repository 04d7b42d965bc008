"""Who reads what for whom: random wants of simulated ranks, carried out on arrays of element numbers."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchtitan_ext import _core

Tag = tuple[str, str, int, bool, bool]


class Rank(NamedTuple):
    """The items that one rank wants, each of a chunk, with its tag; own items have tag -1."""

    items: list[ReadItem]
    tags: list[Tag]
    tag_of: list[int]


def item_of(key: str, chunk: int, offsets: tuple[int, ...], sizes: tuple[int, ...], number: int) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(f"{key} {number}"),
        torch.Size([0] * len(sizes)),
        MetadataIndex(key, torch.Size([0] * len(sizes)), chunk),
        torch.Size(offsets),
        torch.Size(sizes),
    )


def random_shapes(draw: random.Random, sizes: list[int]) -> dict[str, tuple[int, ...]]:
    return {f"key {key}": tuple(draw.choice(sizes) for _ in range(draw.randint(0, 3))) for key in range(6)}


def random_ranks(
    draw: random.Random, num_ranks: int, tags: list[Tag], shapes: dict[str, tuple[int, ...]]
) -> list[Rank]:
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for key, shape in shapes.items():
        boxes[key] = []
        for _ in range(draw.randint(1, 4)):
            begins = [draw.randrange(size) for size in shape]
            ends = [draw.randint(begin + 1, size) for begin, size in zip(begins, shape, strict=True)]
            boxes[key].append((tuple(begins), tuple(e - b for b, e in zip(begins, ends, strict=True))))
        boxes[key].append((tuple(0 for _ in shape), shape))
    ranks = []
    for _ in range(num_ranks):
        if ranks and draw.random() < 0.4:
            ranks.append(draw.choice(ranks))  # a replica
            continue
        wanted = [(key, *draw.choice(boxes[key])) for key in shapes for _ in range(draw.randint(0, 2))]
        items = [item_of(key, 3, offsets, sizes, number) for number, (key, offsets, sizes) in enumerate(wanted)]
        ranks.append(Rank(items, tags, [draw.choice([-1, *range(len(tags)), 0, 0]) for _ in items]))
    return ranks


def plan_of(ranks: list[Rank], keys: dict[str, int], hosts: list[int], *, is_per_host: bool) -> _core.SharePlan:
    messages = []
    for rank in ranks:
        wanted = _core.WantedReads()
        wanted.add(rank.items, rank.tag_of, keys)
        messages.append(wanted.message(rank.tags))
    return _core.SharePlan(messages, [0] * len(ranks), hosts, is_per_host)


def boxes_of(
    columns: _core.PartColumns, targets: list[torch.Tensor], wholes: dict[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Per part the item, and its boxes in the target and in the whole tensor."""
    rows = (columns.items, columns.storage_indices, columns.dest_offsets, columns.storage_offsets, columns.lengths)
    for item, index, dest_offsets, storage_offsets, sizes in zip(*rows, strict=True):
        yield item, box(targets[item], dest_offsets, sizes), box(wholes[index.fqn], storage_offsets, sizes)


def box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def peers_of(table: bytes) -> list[tuple[int, int]]:
    """Of a table of ``exchange_runs_``, whose boxes are whole tensors: the other rank and the tensor of each."""
    entries = torch.frombuffer(bytearray(table), dtype=torch.int64).tolist() if table else []
    found, place = [], 0
    while place < len(entries):
        peer, tensor, dtype, num_dims = entries[place : place + 4]
        assert dtype == -1 and not any(entries[place + 4 : place + 4 + num_dims])
        found.append((peer, tensor))
        place += 4 + 2 * num_dims
    return found


def exchange(
    exchanges: list[_core.SharedExchange], read: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]
) -> None:
    for sender, sending in enumerate(exchanges):
        for receiver, receiving in enumerate(exchanges):
            sent = [read[sender][sending.sources[one]] for peer, one in peers_of(sending.sends) if peer == receiver]
            to = [
                wanted[receiver][receiving.targets[one]] for peer, one in peers_of(receiving.receives) if peer == sender
            ]
            assert [one.shape for one in sent] == [one.shape for one in to]
            for source, target in zip(sent, to, strict=True):
                assert int(source.min()) > 0, "sent before it was read"
                target.copy_(source)


@pytest.mark.parametrize("is_per_host", [False, True])
@pytest.mark.parametrize("sample", [[], [0.02, 0.1, 0.1]])
def test_random_wants_are_filled_and_read_once(is_per_host: bool, sample: list[float]) -> None:
    most_rounds = 0
    for seed in range(120):
        draw = random.Random(seed)
        is_large = draw.random() < 0.3  # many parts and rounds
        item_bytes = 1000 if is_large else 4
        shapes = random_shapes(draw, [1, 2, 5, 21, 30] if is_large else [1, 2, 5, 8, 13])
        wholes = {key: torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape) for key, shape in shapes.items()}
        tags: list[Tag] = [("a", "cpu", item_bytes, True, False), ("b", "cuda", 1, draw.random() < 0.5, False)]
        tags += [("a", "cpu", item_bytes, True, True)] if draw.random() < 0.3 else []
        ranks = random_ranks(draw, draw.randint(2, 6), tags, shapes)
        hosts = [draw.randrange(2) for _ in ranks]
        numbers = {key: number for number, key in enumerate(sorted(shapes))}
        plan = plan_of(ranks, numbers, hosts, is_per_host=is_per_host)
        assert plan.wanted_bytes >= plan.repeated_bytes >= 2 * plan.shared_bytes
        plan.assign(sample, 5)
        parts = [_core.SharedPart(plan.part_message(rank)) for rank in range(len(ranks))]
        targets = [[torch.zeros(item.lengths, dtype=torch.int64) for item in rank.items] for rank in ranks]
        counts: dict[tuple[str, int, int], torch.Tensor] = {}  # how often elements are read, by key, tag and host
        for number in range(parts[0].num_rounds):
            read: list[list[torch.Tensor]] = [[] for _ in ranks]
            wanted: list[list[torch.Tensor]] = [[] for _ in ranks]
            for rank, part in enumerate(parts):
                items = ranks[rank].items
                for item, target, whole in boxes_of(part.reads(number, items, torch.Size), targets[rank], wholes):
                    target.copy_(whole)
                    read[rank].append(target)
                    key = items[item].storage_index.fqn
                    of_what = (key, ranks[rank].tag_of[item], hosts[rank] if is_per_host else 0)
                    counts.setdefault(of_what, torch.zeros(torch.Size(shapes[key]).numel()))[whole.flatten() - 1] += 1
                boxes = boxes_of(part.receives(number, items, torch.Size), targets[rank], wholes)
                wanted[rank] = [target for _, target, _ in boxes]
            for device in range(len(plan.devices)):
                exchange([part.exchange(number, device) for part in parts], read, wanted)
        assert all(int(count.max()) == 1 for count in counts.values()), seed
        most_rounds = max(most_rounds, parts[0].num_rounds - len(sample))
        for rank, part in enumerate(parts):
            for number, item in enumerate(ranks[rank].items):
                tag = ranks[rank].tag_of[number]
                if number not in part.items:
                    assert not targets[rank][number].any()  # the rank reads it whole
                elif not tags[tag][4]:
                    whole = wholes[item.storage_index.fqn]
                    assert torch.equal(targets[rank][number], box(whole, item.storage_offsets, item.lengths)), seed
    assert most_rounds > 1


def test_parts_are_dealt_out_evenly() -> None:
    tags: list[Tag] = [("a", "cpu", 2, True, False)]
    rank = Rank([item_of("key", 0, (0, 0), (30_000, 2048), 0)], tags, [0])  # 117 MiB
    plan = plan_of([rank] * 4, {"key": 0}, [0, 0, 1, 1], is_per_host=False)
    assert (plan.wanted_bytes, plan.repeated_bytes, plan.shared_bytes) == (
        4 * 122_880_000,
        4 * 122_880_000,
        122_880_000,
    )
    plan.assign([], 16)
    read = []
    for number in range(4):
        part = _core.SharedPart(plan.part_message(number))
        rounds = [part.reads(one, rank.items, torch.Size).lengths for one in range(part.num_rounds)]
        assert len(rounds) > 4 and all(rounds)
        read.append(sum(sizes.numel() * 2 for of_round in rounds for sizes in of_round))
    assert sum(read) == 122_880_000 and max(read) - min(read) <= 2 << 20
    assert len(set(plan.bytes_between)) == 12


def test_what_is_overwritten_is_read_first() -> None:
    """In the first round, by whatever rank and wherever it lies in its files: what overwrites it comes later."""
    tags: list[Tag] = [("a", "cpu", 2, True, False), ("a", "cpu", 2, True, True)]
    sizes = (10_000, 1024)  # 20 MB
    items = [item_of(key, 0, (0, 0), sizes, number) for number, key in enumerate(("first", "tied", "last"))]
    rank = Rank(items, tags, [0, 1, 0])
    plan = plan_of([rank] * 3, {"first": 0, "last": 1, "tied": 2}, [0] * 3, is_per_host=False)
    plan.assign([], 8)
    rounds: dict[bool, list[int]] = {False: [], True: []}
    for number in range(3):
        part = _core.SharedPart(plan.part_message(number))
        for one in range(part.num_rounds):
            for item in part.reads(one, items, torch.Size).items:
                rounds[item == 1].append(one)
    assert len(rounds[True]) >= 3 and set(rounds[True]) == {0}
    assert set(rounds[False]) == set(range(part.num_rounds)) and part.num_rounds > 3


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted reads: broken at byte"):
        _core.SharePlan([b"\xff\xff", b""], [0, 0], [0, 0], False)
    with pytest.raises(ValueError, match="shared reads: broken at byte"):
        _core.SharedPart(b"\x01\x7f")
