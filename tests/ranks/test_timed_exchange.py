"""Bytes of every length arrive whole, in one message or two; what is given up keeps its memory."""

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import LostRankError
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


def give_up(rank: int, world_size: int) -> tuple[str, int, bool]:
    """Rank 1 comes late: the memory into which rank 0 still receives is kept, and let go when it has come."""
    group = dist.group.WORLD
    assert group is not None
    watch = Watch("save", group, path="/step", timeout_seconds=0.5)
    exchange = TimedExchange(group, watch)
    watch.begin("plan", "testing")
    watch.at("model")
    if rank == 1:
        time.sleep(4)
    with pytest.raises(LostRankError) as caught:
        exchange.heads(b"data", OPENING)
    num_kept = len(watches._unfinished)
    watch.close()
    if rank == 1:
        # As one that came too late and knows nothing: what rank 0 waits for comes.
        dist.all_gather([torch.zeros(1024, dtype=torch.uint8) for _ in range(2)], torch.ones(1024, dtype=torch.uint8))
    else:
        work, (_, rows) = next(iter(watches._unfinished))
        work.wait()
        assert rows[1].eq(1).all()
    is_kept = any(not work.is_completed() for work, _ in watches._unfinished)
    watches._unfinished.clear()
    return str(caught.value), num_kept, is_kept


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


def test_what_was_given_up_keeps_its_memory(run_world: Callable[..., Any]) -> None:
    (first, num_kept, is_kept), (second, num_late, _) = run_world(2, give_up)
    assert first == second and "rank 1 is still at work (plan, model, for " in first
    assert (num_kept, is_kept, num_late) == (1, False, 0)


def begin_late(rank: int, world_size: int) -> str:
    """The thread and the store of rank 1 get their first turn late, as where all processors are busy."""
    take = watches.take_clone

    def take_late(*arguments: Any) -> Any:
        time.sleep(1.5 * rank)
        return take(*arguments)

    with (
        mock.patch.multiple(watches, _ROLL_CALL_SECONDS=0.2, TAKE_OVER_SECONDS=0.1, take_clone=take_late),
        Phases("save", timeout_seconds=60) as phases,
    ):
        assert phases.on_all("plan", lambda: rank, doing="testing") == [0, 1]
    group = dist.group.WORLD
    assert group is not None
    watch = Watch("save", group, path="/step", timeout_seconds=60)
    watch.begin("plan", "testing")
    watch.close()
    error = watch._lost_store()
    assert error.silent == ()
    return str(error)


def test_a_store_that_answers_late_is_not_lost(run_world: Callable[..., Any]) -> None:
    for text in run_world(2, begin_late):
        assert text.startswith(
            "save failed in phase plan of /step while testing; no roll call could be held; the store "
        )
        assert re.search(r"the store of the process groups, the file /.*store, is lost; ", text)


def through_a_store_that_cannot_be_asked(rank: int, world_size: int, folder: str) -> tuple[list[int], str]:
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
            ranks = phases.on_all("plan", lambda: rank, doing="testing")
        if rank == 1:  # does not come
            return ranks, ""
        with pytest.raises(LostRankError) as caught, Phases("save", timeout_seconds=0.5) as phases:
            phases.on_all("write", lambda: rank, doing="testing")
        return ranks, str(caught.value)
    finally:
        dist.destroy_process_group()


def test_ranks_whose_store_cannot_be_asked_have_their_deadlines(run_world: Callable[..., Any], tmp_path: Any) -> None:
    results = run_world(2, through_a_store_that_cannot_be_asked, str(tmp_path), process_group=False)
    assert [ranks for ranks, _ in results] == [[0, 1]] * 2
    assert results[0][1].startswith("save failed on rank 0 in phase write while testing; rank(s) 1 did not answer")


def leave_a_work(rank: int, world_size: int) -> tuple[float, float]:
    """When this rank left a work in which rank 1 fails, and when it could go on."""
    group = dist.group.WORLD
    assert group is not None
    watch = Watch("reshard", group, path="", timeout_seconds=60)
    watch.begin("exchange", "testing")
    watch.enter_exchange("left")
    if rank == 0:
        time.sleep(0.5)
    left = time.monotonic()
    watch.leave_exchange(OSError("boom") if rank == 1 else None)
    returned = time.monotonic()
    dist.barrier()
    watch.close()
    return left, returned


def test_a_rank_that_fails_in_a_work_goes_on_when_all_are_out_of_it(run_world: Callable[..., Any]) -> None:
    (left, _), (_, returned) = run_world(2, leave_a_work)
    assert returned > left
