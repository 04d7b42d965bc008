"""A rank that dies or never comes: an error that says which and when, long before the timeout of the process group."""

import os
import re
import resource
import signal
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_clock import FakeClock
from lost_worlds import end_rank, run_losing_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext import clock
from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks import lost_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks

LOST_RANK = 1
LARGE = 25_000_000
# In the middle of a transfer gloo often says nothing, and the error comes with the timeout of the process group.
TIMEOUT = timedelta(seconds=60)


def dying_where(text: str) -> Callable[..., AbstractContextManager[None]]:
    """In the place of ``naming_lost_ranks``: the rank dies where it begins to do this."""

    def name(operation: str, phase: Any, scope: Any) -> AbstractContextManager[None]:
        if text in (phase if isinstance(phase, str) else phase()):
            signal.raise_signal(signal.SIGKILL)
        return naming_lost_ranks(operation, phase, scope)

    return name


def lose(rank: int, port: int, channels: Any, when: str) -> None:
    """One rank. Says twice what it got."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    lost_ranks._ROLL_CALL_SECONDS = 10.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=TIMEOUT)
    tensors, mesh = [torch.zeros(LARGE if when == "sending" else 10)], init_device_mesh("cpu", (3,))
    tte.sync.broadcast_tensors(tensors)
    if rank == LOST_RANK:
        if when != "sending":
            signal.raise_signal(signal.SIGKILL)
        tte.sync.naming_lost_ranks = dying_where("tensors were sent")  # type: ignore[attr-defined]
    with pytest.raises(LostRankError) as caught:
        if when == "checking":
            tte.check_replicas(nn.Linear(3, 3), mesh)
        else:
            tte.sync.broadcast_tensors(tensors, check=when == "agreeing")
    for _ in range(2):
        channels[0].put((rank, str(caught.value)))
    end_rank(channels)


PHASES = {
    "agreeing": "broadcast_tensors failed on rank {} while ranks agreed on what to sync; nothing was changed; ",
    "sending": "broadcast_tensors failed on rank {} while tensors were sent; some may be part-written; ",
    "checking": "check_replicas failed on rank {} while replicas were compared; ",
}


@pytest.mark.nightly("lost")
@pytest.mark.parametrize("when", PHASES)
def test_a_dead_rank_is_named_with_the_phase(when: str) -> None:
    results, _ = run_losing_world(lose, when, kind="kill", culprit=LOST_RANK)
    assert [len(results[rank]) for rank in range(3)] == [2, 0, 2]
    for rank in (0, 2):
        ((text,), _) = results[rank]
        assert text.startswith(PHASES[when].format(rank))
        # In the middle of a transfer one may notice long before the other, which answers too late.
        silent = "(1|0, 1|1, 2)" if when == "sending" else "1"
        assert re.search(rf"; rank\(s\) {silent} did not answer a roll call; the backend says: ", text), text


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, work: Callable[[int], Any], store: dist.Store | None = None
) -> dict[int, Any]:
    """Runs the work of all ranks on a fake clock, over one store."""
    fake, shared, ranks = FakeClock(monkeypatch), store or dist.HashStore(), list(range(num_ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: fake.rank)
    monkeypatch.setattr(lost_ranks, "_get_default_store", lambda: shared)
    monkeypatch.setattr(lost_ranks, "scope_ranks", lambda scope: ranks)
    return fake.run({rank: lambda rank=rank: work(rank) for rank in ranks})


def silent_in(operation: str) -> tuple[int, ...]:
    """The ranks that do not answer when this one notices that a rank is lost."""
    with pytest.raises(LostRankError) as caught, naming_lost_ranks(operation, "testing", None):
        raise dist.DistNetworkError("connection reset")
    return caught.value.silent


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_an_answer_counts_for_one_failure(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """All ranks notice a first failure, neighbours first; of a second one the last rank says nothing."""
    last = num_ranks - 1

    def fail_twice(rank: int) -> list[tuple[int, ...]]:
        clock.sleep(4 * rank / num_ranks)
        silent = [silent_in("sync")]
        clock.sleep(100)
        return silent if rank == last else [*silent, silent_in("sync")]

    expected: dict[int, list[tuple[int, ...]]] = {rank: [(), (last,)] for rank in range(last)}
    assert run_ranks(monkeypatch, num_ranks, fail_twice) == {**expected, last: [()]}


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(monkeypatch, 1, lambda rank: (silent_in("sync"), clock.now())) == {0: ((), 0.0)}


def test_without_a_store_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(dist.Store):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection refused")

    assert run_ranks(monkeypatch, 2, lambda rank: silent_in("sync"), Gone()) == {0: (1,), 1: (0,)}


def test_threads_answer_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save and a sync of two threads lose a rank at once: neither takes the other's answer back."""
    fake, store = FakeClock(monkeypatch), dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: fake.rank[0])
    monkeypatch.setattr(lost_ranks, "_get_default_store", lambda: store)
    monkeypatch.setattr(lost_ranks, "scope_ranks", lambda scope: [0, 1])

    def lose(operation: str, seconds: float) -> tuple[int, ...]:
        clock.sleep(seconds)
        return silent_in(operation)

    begins = {(0, "save"): 0.0, (1, "save"): 1.0, (0, "sync"): 0.5, (1, "sync"): 0.5}
    results = fake.run({one: lambda one=one: lose(one[1], begins[one]) for one in begins})
    assert results == dict.fromkeys(begins, ())


def test_a_world_that_failed_lets_go_of_its_store() -> None:
    """And with it of its port, on which the next one is to listen."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(LostRankError) as caught, naming_lost_ranks("sync", "testing", None):
            raise dist.DistNetworkError("connection reset")
    finally:
        dist.destroy_process_group()
    known = weakref.ref(store)
    del store
    assert known() is None and caught.value.silent == ()


def test_a_lack_of_memory_is_not_a_lost_rank() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"), naming_lost_ranks("sync", "testing", None):
        raise torch.OutOfMemoryError("no room")


def fail_locally(rank: int, world_size: int) -> list[str]:
    """What no collective raised keeps its type, and costs no roll call."""
    roll_call = patch.object(lost_ranks, "_silent_ranks", side_effect=AssertionError("a roll call was held"))
    with roll_call, pytest.raises(RuntimeError) as stride, naming_lost_ranks("save", "testing", None):
        torch.zeros(1, 2)[:, 0].view(torch.uint8)
    # A bucket that gets no memory: the tensor is there, but never touched.
    tensor = torch.empty(2, 1 << 26).t()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        with roll_call, pytest.raises(RuntimeError) as memory:
            tte.sync.broadcast_tensors([tensor], bucket_bytes=1 << 29)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return [f"{type(caught.value).__name__}: {caught.value}" for caught in (stride, memory)]


def test_what_goes_wrong_on_one_rank_alone_is_no_lost_rank(run_world: Callable[..., Any]) -> None:
    for stride, memory in run_world(2, fail_locally):
        assert stride.startswith("RuntimeError: self.stride(-1) must be 1")
        assert memory.startswith("RuntimeError: ") and "can't allocate memory" in memory


def fail_in_collectives(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Rank 1 has left the groups: the collectives of the other fail."""
    groups = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    if rank == 1:
        for group in groups:
            dist.destroy_process_group(group)
        del group, groups
        dist.barrier()
        return []
    found = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1), group=groups[0]),
        lambda: dist.broadcast_object_list([None], 1, group=groups[1]),
    ]
    with patch.object(lost_ranks, "_ROLL_CALL_SECONDS", 0.0):
        for call in calls:
            with pytest.raises(LostRankError) as caught, naming_lost_ranks("save", "testing", groups[0]):
                call()
            found.append(caught.value.silent)
    dist.barrier()
    return found


def test_what_a_collective_raises_is_a_lost_rank(run_world: Callable[..., Any]) -> None:
    assert run_world(2, fail_in_collectives) == [[(1,), (1,)], []]
