"""A rank that dies or never comes: an error that says which and when, long before the timeout of the process group."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_worlds import LONGEST_SECONDS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks import lost_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks

LOST_RANK = 1
LARGE = 25_000_000
# In the middle of a transfer gloo often says nothing (a plain dist.broadcast: in 10 of 12 trials), and the error comes
# with the timeout of the process group, which is half an hour by default.
TIMEOUT = timedelta(seconds=3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose(rank: int, world_size: int, folder: str, when: str) -> None:
    """Survivors write down what they got: the world fails as a whole."""
    tensors = [torch.zeros(LARGE if when == "sending" else 10)]
    mesh = init_device_mesh("cpu", (world_size,))
    group = dist.new_group(timeout=TIMEOUT) if when == "sending" else None
    tte.sync.broadcast_tensors(tensors, group=group)
    if rank == LOST_RANK:
        if when == "sending":
            # From now on this rank does nothing but transfers: the timer ends it in one.
            threading.Timer(0.05, die).start()
        else:
            die()
    start = time.perf_counter()
    with pytest.raises(LostRankError) as caught:
        if when == "checking":
            tte.check_replicas(nn.Linear(3, 3), mesh)
        while when != "checking":
            tte.sync.broadcast_tensors(tensors, group=group, check=when == "agreeing")
    assert time.perf_counter() - start < LONGEST_SECONDS
    Path(folder, str(rank)).write_text(str(caught.value))


PHASES = {
    "agreeing": "broadcast_tensors failed on rank {} while ranks agreed on what to sync; nothing was changed; ",
    "sending": "broadcast_tensors failed on rank {} while tensors were sent; some may be part-written; ",
    "checking": "check_replicas failed on rank {} while replicas were compared; ",
}


@pytest.mark.parametrize("when", PHASES)
def test_a_dead_rank_is_named_with_the_phase(run_world: Callable[..., Any], tmp_path: Path, when: str) -> None:
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, lose, str(tmp_path), when)
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert texts.keys() == {0, 2}
    for rank, text in texts.items():
        assert text.startswith(PHASES[when].format(rank))
        assert f"; rank(s) {LOST_RANK} did not answer a roll call; the backend says: " in text


def fail_twice(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """All ranks notice a first failure; of a second one, after a sync that went well, rank 2 says nothing."""
    silent = []
    for noticing in ([0, 1, 2], [0, 1]):
        if rank in noticing:
            with pytest.raises(LostRankError) as caught, naming_lost_ranks("sync", "testing", None):
                raise dist.DistNetworkError("connection reset")
            silent.append(caught.value.silent)
        dist.barrier()
        tte.sync.broadcast_tensors([torch.zeros(3)])
        dist.barrier()
    return silent


def test_an_answer_counts_for_one_failure(run_world: Callable[..., Any]) -> None:
    assert run_world(3, fail_twice) == [[(), (2,)], [(), (2,)], [()]]


def test_a_world_that_failed_gives_its_port_back() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        try:
            with pytest.raises(LostRankError), naming_lost_ranks("sync", "testing", None):
                raise dist.DistNetworkError("connection reset")
        finally:
            dist.destroy_process_group()


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


def wait_in_vain(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Rank 1 takes no part: the collectives of the other give up after the group's timeout."""
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]
    dist.barrier()
    found = []
    if rank == 0:
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1), group=groups[0]),
            lambda: dist.broadcast_object_list([None], 1, group=groups[1]),
        ]
        for call in calls:
            with pytest.raises(LostRankError) as caught, naming_lost_ranks("save", "testing", groups[0]):
                call()
            found.append(caught.value.silent)
    dist.barrier()
    return found


def test_what_a_collective_raises_is_a_lost_rank(run_world: Callable[..., Any]) -> None:
    assert run_world(2, wait_in_vain) == [[(1,), (1,)], []]


def two_at_once(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """A save and a sync of two threads lose a rank at once: neither takes the other's answer back."""
    silent: dict[str, tuple[int, ...]] = {}

    def lose(operation: str, seconds: float) -> None:
        time.sleep(seconds)
        with pytest.raises(LostRankError) as caught, naming_lost_ranks(operation, "testing", None):
            raise dist.DistNetworkError("connection reset")
        silent[operation] = caught.value.silent

    threads = [threading.Thread(target=lose, args=("save", rank)), threading.Thread(target=lose, args=("sync", 0.5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [silent["save"], silent["sync"]]


def test_threads_answer_apart(run_world: Callable[..., Any]) -> None:
    assert run_world(2, two_at_once) == [[(), ()]] * 2
