"""Bytes of every length arrive whole, in one message or two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.ranks import watch as watches
from torchtitan_ext.ranks.exchange import Opening, TimedExchange, gather_values
from torchtitan_ext.ranks.watch import Watch

OPENING = Opening("save", "phase plan of save")
OPENING_BYTES = len(OPENING.encoded())

# Around the room of the first message: 1024 less one length and what it says of the call, or less two lengths.
LENGTHS = [0, 1, 1007, 1008, 1009, *(1016 - OPENING_BYTES + more for more in (-1, 0, 1)), 1024, 5000]


def part_of(rank: int, length: int) -> bytes:
    """Another length on every rank."""
    return bytes((rank + position) % 251 for position in range(max(0, length - 3 * rank)))


def exchange_all(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    watch = Watch("save", group, path="/step", timeout_seconds=60)
    exchange = TimedExchange(group, watch)
    watch.begin("plan", "testing")
    for length in LENGTHS:
        data = part_of(rank, length)
        everyone = [part_of(other, length) for other in range(world_size)]
        assert [bytes(one) for one in exchange.rest_on_all(data, exchange.heads(data, OPENING))] == everyone
        gathered = exchange.rest_on_coordinator(data, exchange.heads(data, OPENING))
        assert [bytes(one) for one in gathered] == (everyone if rank == 0 else [])
        assert bytes(exchange.scatter(everyone if rank == 0 else [])) == data
        assert bytes(exchange.broadcast(everyone[0] if rank == 0 else b"")) == everyone[0]
    watch.confirm()
    watch.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_length_arrives_whole(run_world: Callable[..., Any], world_size: int) -> None:
    run_world(world_size, exchange_all)


def count_kept(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    """Whether what was exchanged last, with deadlines and without, is kept when it is done."""
    group = dist.group.WORLD
    assert group is not None
    watches._ended.clear()
    watch = Watch("save", group, path="/step", timeout_seconds=30)
    watch.begin("plan", "testing")
    TimedExchange(group, watch).heads(b"data", OPENING)
    watch.close()
    timed = [work.is_completed() for work in watches._ended]
    watches._ended.clear()
    gather_values("value", group, opening=OPENING)
    return timed, [work.is_completed() for work in watches._ended]


def test_the_last_collective_is_kept(run_world: Callable[..., Any]) -> None:
    """A thread of gloo that frees its tensors would abort a process that ends meanwhile."""
    assert run_world(2, count_kept) == [([True], [True])] * 2


def through_a_store_that_cannot_be_asked(rank: int, world_size: int, folder: str) -> list[int]:
    class Relay(dist.Store):
        """What a process group needs of a store, and no more: neither ``clone`` nor ``check``."""

        def __init__(self) -> None:
            super().__init__()
            self.files = dist.FileStore(f"{folder}/relayed", world_size)

        def set(self, key: str, value: Any) -> None:
            self.files.set(key, value)

        def get(self, key: str) -> bytes:
            return self.files.get(key)

        def add(self, key: str, value: int) -> int:
            return self.files.add(key, value)

        def wait(self, keys: list[str], *timeout: Any) -> None:
            self.files.wait(keys, *timeout)

    dist.init_process_group("gloo", store=Relay(), rank=rank, world_size=world_size)
    try:
        with Phases("save") as phases:
            return phases.on_all("plan", lambda: rank, doing="testing")
    finally:
        dist.destroy_process_group()


def test_ranks_whose_store_cannot_be_asked_have_phases(run_world: Callable[..., Any], tmp_path: Any) -> None:
    results = run_world(2, through_a_store_that_cannot_be_asked, str(tmp_path), process_group=False)
    assert results == [[0, 1]] * 2
