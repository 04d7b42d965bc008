"""Who reads what for whom: random wants of simulated ranks, carried out on arrays of element numbers."""

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

    def reads(self, keys: Iterable[str]) -> _core.RankReads:
        """Of a checkpoint with these keys."""
        entry = SimpleNamespace(properties=SimpleNamespace(dtype=torch.int64))
        return _core.RankReads(self.items, dict.fromkeys(keys, entry))

    def share(self, keys: Iterable[str], message: bytes) -> _core.RankReads:
        reads = self.reads(keys)
        reads.share(message)
        return reads


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


def plan_of(ranks: list[Rank], keys: Iterable[str], hosts: list[int]) -> _core.SharePlan:
    messages = []
    for rank in ranks:
        tag_of = [None if tag < 0 else rank.tags[tag] for tag in rank.tag_of]
        messages.append(rank.reads(keys).wanted(tag_of))
    return _core.SharePlan(messages, [0] * len(ranks), hosts)


def number_of(part: ReadItem) -> int:
    """The item of which it is a part."""
    return int(part.dest_index.fqn.rsplit(" ", 1)[1])


def target_of(part: ReadItem, targets: list[torch.Tensor]) -> torch.Tensor:
    return box(targets[number_of(part)], part.dest_offsets, part.lengths)


def box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def peers_of(table: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Of a table of ``exchange_runs_``, whose boxes are whole tensors: the other rank and the tensor of each."""
    entries = table.tolist()
    found, place = [], 0
    while place < len(entries):
        peer, tensor, dtype, num_dims = entries[place : place + 4]
        assert dtype == -1 and not any(entries[place + 4 : place + 4 + num_dims])
        found.append((peer, tensor))
        place += 4 + 2 * num_dims
    return found


def exchange(exchanges: list[_core.SharedExchange], targets: list[list[torch.Tensor]]) -> None:
    for sender, sending in enumerate(exchanges):
        for receiver, receiving in enumerate(exchanges):
            sent = [
                target_of(sending.sources[one], targets[sender])
                for peer, one in peers_of(sending.sends)
                if peer == receiver
            ]
            to = [
                target_of(receiving.targets[one], targets[receiver])
                for peer, one in peers_of(receiving.receives)
                if peer == sender
            ]
            assert [one.shape for one in sent] == [one.shape for one in to]
            for source, target in zip(sent, to, strict=True):
                assert int(source.min()) > 0, "sent before it was read"
                target.copy_(source)


def test_random_wants_are_filled_and_read_once() -> None:
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
        plan = plan_of(ranks, shapes, hosts)
        assert plan.wanted_bytes >= plan.repeated_bytes >= 2 * plan.shared_bytes
        plan.assign(5)
        parts = [rank.share(shapes, plan.part_message(number)) for number, rank in enumerate(ranks)]
        shared = [set(part.shared_items) for part in parts]
        own: list[list[int]] = [[] for _ in ranks]
        targets = [[torch.zeros(item.lengths, dtype=torch.int64) for item in rank.items] for rank in ranks]
        counts: dict[tuple[str, int], torch.Tensor] = {}  # how often elements are read, by key and tag
        for number in range(parts[0].num_rounds):
            for rank, part in enumerate(parts):
                for item in part.reads(number).items:
                    if number_of(item) not in shared[rank]:
                        own[rank].append(number_of(item))
                        continue
                    key = item.storage_index.fqn
                    whole = box(wholes[key], item.storage_offsets, item.lengths)
                    target_of(item, targets[rank]).copy_(whole)
                    of_what = (key, ranks[rank].tag_of[number_of(item)])
                    counts.setdefault(of_what, torch.zeros(torch.Size(shapes[key]).numel()))[whole.flatten() - 1] += 1
            for device in range(len(plan.devices)):
                exchange([part.exchange(number, device) for part in parts], targets)
        assert all(int(count.max()) == 1 for count in counts.values()), seed
        most_rounds = max(most_rounds, parts[0].num_rounds)
        for rank in range(len(ranks)):
            assert sorted({*own[rank], *shared[rank]}) == list(range(len(ranks[rank].items)))
            assert len(set(own[rank])) == len(own[rank])
            for number, item in enumerate(ranks[rank].items):
                tag = ranks[rank].tag_of[number]
                if number not in shared[rank]:
                    assert not targets[rank][number].any()  # the rank reads it whole
                elif not tags[tag][4]:
                    whole = wholes[item.storage_index.fqn]
                    assert torch.equal(targets[rank][number], box(whole, item.storage_offsets, item.lengths)), seed
    assert most_rounds > 1


def test_parts_are_dealt_out_evenly() -> None:
    tags: list[Tag] = [("a", "cpu", 2, True, False)]
    rank = Rank([item_of("key", 0, (0, 0), (30_000, 2048), 0)], tags, [0])  # 117 MiB
    plan = plan_of([rank] * 4, ["key"], [0, 0, 1, 1])
    assert (plan.wanted_bytes, plan.repeated_bytes, plan.shared_bytes) == (
        4 * 122_880_000,
        4 * 122_880_000,
        122_880_000,
    )
    plan.assign(16)
    read = []
    for number in range(4):
        part = rank.share(["key"], plan.part_message(number))
        rounds = [part.reads(one).items for one in range(part.num_rounds)]
        assert len(rounds) > 4 and all(rounds)
        read.append(sum(item.lengths.numel() * 2 for of_round in rounds for item in of_round))
    assert sum(read) == 122_880_000 and max(read) - min(read) <= 2 << 20
    assert len(set(plan.bytes_between)) == 12


def test_what_is_overwritten_is_read_first() -> None:
    """In the first round, by whatever rank and wherever it lies in its files: what overwrites it comes later."""
    tags: list[Tag] = [("a", "cpu", 2, True, False), ("a", "cpu", 2, True, True)]
    sizes = (10_000, 1024)  # 20 MB
    items = [item_of(key, 0, (0, 0), sizes, number) for number, key in enumerate(("first", "tied", "last"))]
    rank = Rank(items, tags, [0, 1, 0])
    keys = ["first", "last", "tied"]
    plan = plan_of([rank] * 3, keys, [0] * 3)
    plan.assign(8)
    rounds: dict[bool, list[int]] = {False: [], True: []}
    for number in range(3):
        part = rank.share(keys, plan.part_message(number))
        for one in range(part.num_rounds):
            for item in part.reads(one).items:
                rounds[number_of(item) == 1].append(one)
    assert len(rounds[True]) >= 3 and set(rounds[True]) == {0}
    assert set(rounds[False]) == set(range(part.num_rounds)) and part.num_rounds > 3


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted reads: broken at byte"):
        _core.SharePlan([b"\xff\xff", b""], [0, 0], [0, 0])
    with pytest.raises(ValueError, match="shared reads: broken at byte"):
        _core.RankReads([], {}).share(b"\x01\x7f")
