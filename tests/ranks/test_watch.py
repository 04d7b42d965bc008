"""Ranks that are late, stopped, dead or failed: one verdict on all others. Ranks are threads on a fake clock."""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_clock import FakeClock

from torchtitan_ext import clock
from torchtitan_ext._core import RollCall, StoreAction
from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks import watch as watches
from torchtitan_ext.ranks.watch import Watch

TIMEOUT_SECONDS = 20.0
SIZES = [2, 8]


class Collective:
    """One of all ranks: done when all have started it."""

    def __init__(self, fake: FakeClock, num_ranks: int) -> None:
        self.fake, self.num_ranks = fake, num_ranks
        self.started: set[int] = set()
        self.error: RuntimeError | None = None

    def start(self) -> dist.Work:
        self.started.add(self.fake.rank)
        work: Any = self
        return work

    def is_completed(self) -> bool:
        return self.error is not None or len(self.started) == self.num_ranks

    def wait(self, limit: timedelta | None = None) -> None:
        changed, seconds = watches.threading.Condition(), TIMEOUT_SECONDS if limit is None else limit.total_seconds()
        with changed:
            is_done = clock.wait_for(changed, self.is_completed, seconds)
        if self.error is not None:
            raise self.error
        if not is_done:
            raise RuntimeError("timed out")


class World:
    """Ranks of one group, over one store. ``at`` strikes before an action of a rank's thread in the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
        self.fake = FakeClock(monkeypatch)
        self.num_ranks = num_ranks
        self.collective = Collective(self.fake, num_ranks)
        self.store = dist.HashStore()
        self.seen: list[tuple[int, str]] = []
        self.at: Callable[[int, str], object] = lambda rank, action: None
        monkeypatch.setattr(dist, "get_rank", lambda: self.fake.rank)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(num_ranks)))
        monkeypatch.setattr(watches, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(watches, "BackgroundThread", self.fake.start)
        monkeypatch.setattr(watches, "perform", self._perform)
        monkeypatch.setattr(watches, "_unfinished", set())
        monkeypatch.setattr(watches, "_ended", deque(maxlen=2))
        monkeypatch.setattr(watches, "take_clone", lambda group, store: store)
        monkeypatch.setattr(watches, "give_back_clone", lambda group, store: None)
        self._group: Any = SimpleNamespace(group_name="0")

    def _perform(self, action: StoreAction, store: dist.Store) -> watches.Seen:
        name = f"{action.kind} {action.keys[0]}"
        self.seen.append((self.fake.rank, name))
        self.at(self.fake.rank, name)
        return PERFORM(action, store)

    def run(self, work: Callable[[Watch, int], Any]) -> dict[int, Any]:
        """What the operation returned or raised on each rank that lives."""

        def operate(rank: int) -> Any:
            watch = Watch("save", self._group, path="/step", timeout_seconds=TIMEOUT_SECONDS)
            try:
                watch.begin("write", "ranks wrote")
                return work(watch, rank)
            finally:
                watch.close()

        return self.fake.run({rank: lambda rank=rank: operate(rank) for rank in range(self.num_ranks)})

    def meet(self, watch: Watch) -> str:
        watch.wait_for(self.collective.start, torch.empty(1))
        watch.confirm()
        return "met"


PERFORM = watches.perform


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    return lambda num_ranks: World(monkeypatch, num_ranks)


def one_text(results: dict[int, Any]) -> str:
    """That of the error which all ranks have raised."""
    assert {type(result) for result in results.values()} == {LostRankError}, results
    assert len({str(result) for result in results.values()}) == 1, results
    return str(results[min(results)])


def lost(silent: str = "", late: str = "", why: str = "") -> str:
    answers = f"rank(s) {silent} did not answer a roll call" if silent else "all ranks answered a roll call"
    return (
        f"save failed in phase write of /step while ranks wrote; {answers}{late}; {why}; "
        "this process group can serve no further save or load: make a new one, or restart"
    )


WAITED = f"rank 0 waited {TIMEOUT_SECONDS:g} s (timeout_seconds)"


@pytest.mark.parametrize("num_ranks", [1, *SIZES, 64])
def test_ranks_that_all_come(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)

    def work(watch: Watch, rank: int) -> str:
        clock.sleep(100 + rank / num_ranks)  # of its own part, longer than the deadline
        return world.meet(watch)

    assert world.run(work) == dict.fromkeys(range(num_ranks), "met")
    assert {name for _, name in world.seen} == {"read call"}
    assert len(watches._ended) == min(2, num_ranks) and not watches._unfinished


@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_rank_that_is_stopped_raises_the_same_when_it_goes_on(
    make_world: Callable[[int], World], num_ranks: int
) -> None:
    world = make_world(num_ranks)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            world.fake.stop(1)
        try:
            return world.meet(watch)
        finally:
            if rank == 0:
                clock.sleep(60)
                world.fake.go_on(1)

    assert one_text(world.run(work)) == lost("1", why=WAITED)


@pytest.mark.parametrize("num_ranks", [*SIZES, 64])
def test_a_rank_that_dies(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            world.fake.kill(1)
        return world.meet(watch)

    results = world.run(work)
    assert results.keys() == set(range(num_ranks)) - {1}
    assert one_text(results) == lost("1", why=WAITED)
    # What was given up keeps its memory.
    assert len(watches._unfinished) == num_ranks - 1


@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_rank_that_is_late(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            watch.at("model")
            clock.sleep(60)
        return world.meet(watch)

    text = one_text(world.run(work))
    assert text == lost(late="; rank 1 is still at work (write, model, for 21 s)", why=WAITED)


def test_a_connection_that_breaks_is_a_call_at_once(make_world: Callable[[int], World]) -> None:
    world = make_world(3)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            world.collective.error = RuntimeError("Connection closed by peer")
            world.fake.kill(1)
        return world.meet(watch)

    text = one_text(world.run(work))
    assert text.startswith(
        "save failed in phase write of /step while ranks wrote; rank(s) 1 did not answer a roll call; "
    )
    assert " says: Connection closed by peer; " in text
    assert world.fake.seconds < TIMEOUT_SECONDS


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_the_caller_is_lost_too(make_world: Callable[[int], World], num_ranks: int) -> None:
    """At each of its actions in the store, from its call on."""
    actions = ["set answer/0", "read verdict", "has_all answer/0", "read answer/0", "compare_set verdict"]
    for last in actions:
        world = make_world(num_ranks)

        def strike(rank: int, action: str, last: str = last, world: World = world) -> None:
            if rank == 0 and action == last:
                world.fake.kill(0)

        def work(watch: Watch, rank: int, world: World = world) -> str:
            if rank == 1:
                world.fake.kill(1)
            return world.meet(watch)

        world.at = strike
        results = world.run(work)
        assert results.keys() == set(range(2, num_ranks))
        # Its answer is there where it got so far.
        assert one_text(results) == lost("0, 1" if last == actions[0] else "1", why=WAITED)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_who_calls_first_is_the_caller(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)
    last = num_ranks - 1

    def work(watch: Watch, rank: int) -> str:
        if rank == last:
            watch.leave(KeyboardInterrupt())
            return "left"
        clock.sleep(0.01)
        watch.leave(SystemExit())
        return world.meet(watch)

    results = world.run(work)
    assert results.pop(last) == "left"
    assert one_text(results) == lost(why=f"rank {last} left: KeyboardInterrupt")


def test_all_call_at_once(make_world: Callable[[int], World]) -> None:
    world = make_world(8)

    def work(watch: Watch, rank: int) -> str:
        watch.leave(SystemExit())
        return world.meet(watch)

    text = one_text(world.run(work))
    assert text in {lost(why=f"rank {rank} left: SystemExit") for rank in range(8)}
    assert sum(action == "compare_set call" for _, action in world.seen) == 8


@pytest.mark.parametrize("num_ranks", [1, *SIZES, 64])
def test_rank_0_which_hosts_the_store_is_the_last_to_go(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)

    def work(watch: Watch, rank: int) -> str:
        if rank == 0:
            watch.leave(SystemExit())
        return world.meet(watch)

    one_text(world.run(work))
    ends: dict[int, float] = {}
    for thread in world.fake.threads:
        assert thread.ended_at is not None
        ends[thread.rank] = max(ends.get(thread.rank, 0.0), thread.ended_at)
    assert max(ends.values()) == ends[0]


def test_rank_0_stays_no_longer_than_it_has_to(make_world: Callable[[int], World]) -> None:
    """For one that has answered, and is stopped before it reads the verdict."""
    world = make_world(2)

    def strike(rank: int, action: str) -> None:
        if rank == 1 and action == "read verdict":
            world.fake.stop(1)

    def work(watch: Watch, rank: int) -> float:
        if rank == 0:
            watch.leave(SystemExit())
        with pytest.raises(LostRankError):
            world.meet(watch)
        return clock.now()

    world.at = strike
    results = world.run(work)
    last = max(thread.ended_at or 0.0 for thread in world.fake.threads if thread.rank == 0)
    assert results.keys() == {0}
    assert last == pytest.approx(results[0] + RollCall.LINGER_SECONDS, abs=2 * RollCall.ANSWER_POLL_SECONDS)


def test_a_group_that_is_lost_serves_no_further_operation(make_world: Callable[[int], World]) -> None:
    world = make_world(2)

    def work(watch: Watch, rank: int) -> str:
        if rank == 0:
            watch.leave(SystemExit())
        with pytest.raises(LostRankError) as first:
            world.meet(watch)
        again = Watch("load", world._group, path="/other", timeout_seconds=TIMEOUT_SECONDS)
        again.begin("read", "ranks read")
        with pytest.raises(LostRankError) as second:
            again.confirm()
        again.close()
        assert str(first.value) == str(second.value)
        return str(second.value)

    assert set(world.run(work).values()) == {lost(why="rank 0 left: SystemExit")}


def test_a_rank_that_was_stopped_asks_before_it_goes_on(make_world: Callable[[int], World]) -> None:
    """Its collective had come to its end; the others have given up meanwhile."""
    world = make_world(2)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            world.fake.stop(1)
            watch.confirm()
            return "confirmed"
        try:
            return world.meet(watch)
        finally:
            clock.sleep(100)
            world.fake.go_on(1)

    assert one_text(world.run(work)) == lost("1", why=WAITED)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_store_that_is_lost_with_its_host(make_world: Callable[[int], World], num_ranks: int) -> None:
    world = make_world(num_ranks)

    def strike(rank: int, action: str) -> None:
        if 0 in world.fake.dead:
            raise RuntimeError(f"rank {rank} cannot connect")

    def work(watch: Watch, rank: int) -> str:
        if rank == 0:
            clock.sleep(10)
            world.fake.kill(0)
        return world.meet(watch)

    world.at = strike
    results = world.run(work)
    text = one_text(results)
    assert text == lost("0", why="the store of the process groups, which rank 0 hosts, is lost")
    assert {str(error.__cause__) for error in results.values()} == {f"rank {rank} cannot connect" for rank in results}


def test_a_store_that_answers_late_is_not_lost(make_world: Callable[[int], World]) -> None:
    """As where all processors are busy."""
    world = make_world(2)

    def strike(rank: int, action: str) -> None:
        if (rank, action) not in world.seen[:-1]:
            clock.sleep(TIMEOUT_SECONDS * 0.75 * rank)

    world.at = strike
    assert world.run(lambda watch, rank: world.meet(watch)) == {0: "met", 1: "met"}
    assert world.fake.seconds > watches._ANSWER_SECONDS


def test_ranks_whose_store_cannot_be_asked_have_their_deadlines(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(3)
    monkeypatch.setattr(watches, "can_be_asked", lambda store: False)

    def work(watch: Watch, rank: int) -> str:
        if rank == 1:
            world.fake.kill(1)
        return world.meet(watch)

    results = world.run(work)
    assert not world.seen
    for rank, others in ((0, "1, 2"), (2, "0, 1")):
        assert str(results[rank]).startswith(
            f"save failed on rank {rank} in phase write of /step while ranks wrote; rank(s) {others} did not answer"
        )


@pytest.mark.parametrize("num_ranks", SIZES)
def test_an_error_in_an_exchange_is_that_of_all(make_world: Callable[[int], World], num_ranks: int) -> None:
    """The others wait in it for the rank that failed, which waits until all have given up."""
    world = make_world(num_ranks)
    left_at: dict[int, float] = {}

    def work(watch: Watch, rank: int) -> Any:
        watch.enter_exchange("x")
        if rank == 1:
            clock.sleep(5)
            assert not watch.leave_exchange(OSError("boom"))
        else:
            clock.sleep(10 + rank / num_ranks)  # inside, for a rank that does not come
            is_echo = watch.leave_exchange(RuntimeError("timed out") if rank == 0 else None)
            assert is_echo
        left_at[rank] = clock.now()
        world.meet(watch)
        return watch.announced

    results = world.run(work)
    assert {(position, str(error)) for position, error in results.values()} == {(1, "boom")}
    assert left_at[1] >= max(left_at.values()) - RollCall.ANSWER_POLL_SECONDS


def test_the_next_phase_knows_nothing_of_the_exchange(make_world: Callable[[int], World]) -> None:
    world = make_world(2)

    def work(watch: Watch, rank: int) -> Any:
        watch.enter_exchange("x")
        watch.leave_exchange(OSError("boom") if rank == 1 else None)
        world.meet(watch)
        watch.begin("next", "ranks went on")
        return watch.announced

    assert world.run(work) == {0: None, 1: None}


def test_a_rank_that_is_lost_in_an_exchange_of_which_an_error_is_announced(make_world: Callable[[int], World]) -> None:
    """Who failed waits no longer for it than the others."""
    world = make_world(3)

    def work(watch: Watch, rank: int) -> Any:
        watch.enter_exchange("x")
        if rank == 2:
            world.fake.kill(2)
        watch.leave_exchange(OSError("boom") if rank == 1 else None)
        try:
            return world.meet(watch)
        finally:
            assert watch.announced is not None and str(watch.announced[1]) == "boom"

    results = world.run(work)
    assert "rank(s) 2 did not answer a roll call" in one_text(results)


def test_threads_of_others_have_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat of a lock that an earlier test has left asks the time while ranks wait."""
    end = threading.Event()

    def beat() -> None:
        while not clock.wait(end, 1e-3):
            pass

    other = threading.Thread(target=beat)
    other.start()
    try:
        for _ in range(20):
            fake = FakeClock(monkeypatch)
            fake.run({rank: lambda: [clock.sleep(1) for _ in range(20)] for rank in range(4)})
            assert fake.seconds == 20
    finally:
        end.set()
        other.join()
