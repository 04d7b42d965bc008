"""Phases of one operation: an error of any rank reaches all of them, as ours."""

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from leaps import leaping
from torch.distributed.distributed_c10d import _get_default_store

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import CheckpointFailedError, CheckpointReadError
from torchtitan_ext.ranks.exchange import all_gather_bytes


def fail_on_rank_1(rank: int, world_size: int, error: type[Exception], undefined: tuple[str, ...]) -> str:
    def work() -> int:
        if rank == 1:
            raise CheckpointReadError("w", "bad sector") if error is CheckpointReadError else error("boom")
        return rank

    with pytest.raises(Exception) as caught, Phases("load", path="/step") as phases:
        with phases.changing(undefined, "values were read"):
            phases.on_all("read", work)
    assert phases.seconds["read"] > 0
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("error", "undefined", "text"),
    [
        (
            OSError,
            (),
            r"CheckpointFailedError: load failed on 1 rank\(s\): rank 1: OSError: boom \(in phase read of /step\)$",
        ),
        (OSError, ("w",), "CheckpointFailedError: load failed .* Part-written, load again or start anew: w; all else"),
        (CheckpointReadError, (), "CheckpointReadError: load: cannot read w: bad sector"),
        (CheckpointReadError, ("w",), "CheckpointFailedError: load failed .* bad sector.*Part-written"),
    ],
)
def test_an_error_of_one_rank(run_world: Callable[..., Any], error: Any, undefined: tuple[str, ...], text: str) -> None:
    first, second = run_world(2, fail_on_rank_1, error, undefined)
    assert first == second and re.search(text, first)


def all_three(rank: int, world_size: int) -> tuple[Any, ...]:
    with Phases("save") as phases:
        return phases_of(phases, rank, world_size)


def phases_of(phases: Phases, rank: int, world_size: int) -> tuple[Any, ...]:
    assert phases.rank == rank and phases.size == world_size and phases.is_coordinator == (rank == 0)
    everywhere = phases.on_all("a", lambda: rank, doing="")
    own = phases.through_coordinator("b", lambda: rank, lambda all_of: [10 * value for value in all_of], doing="")
    same = phases.to_coordinator("c", lambda: rank, sum, doing="")
    assert set(phases.seconds) == {"a", "b", "c"}
    return everywhere, own, same


def test_results_go_where_they_should(run_world: Callable[..., Any]) -> None:
    assert run_world(3, all_three) == [([0, 1, 2], 10 * rank, 3) for rank in range(3)]


def in_a_group(rank: int, world_size: int) -> tuple[Any, ...] | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    with Phases("save", group) as phases:
        return phases_of(phases, rank - 1, 2)


def test_ranks_are_counted_in_the_group(run_world: Callable[..., Any]) -> None:
    assert run_world(3, in_a_group) == [None, ([0, 1], 0, 1), ([0, 1], 10, 1)]


class Unreadable:
    """What one rank sends and no rank can read back."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def send_what_cannot_be_read(rank: int, world_size: int) -> list[str]:
    texts = []
    with Phases("load", path="/step") as phases:
        for value in (Unreadable(), lambda: None):
            with pytest.raises(CheckpointFailedError) as caught:
                phases.to_coordinator("plan", lambda value=value: value if rank == 1 else 0, len, doing="testing")
            texts.append(str(caught.value))
        assert phases.on_all("again", lambda: rank, doing="testing") == [0, 1]
    return texts


def test_a_result_that_cannot_be_read_or_sent_names_its_rank(run_world: Callable[..., Any]) -> None:
    first, second = run_world(2, send_what_cannot_be_read)
    assert first == second
    assert first[0].startswith(
        "load failed on 1 rank(s): rank 1: RuntimeError: its result cannot be read back: ValueErr"
    )
    assert first[1].startswith("load failed on 1 rank(s): rank 1: ") and "pickle" in first[1]


def work_longer_than_the_deadline(rank: int, world_size: int) -> list[int]:
    with leaping() as leap, Phases("save", timeout_seconds=60) as phases:
        return phases.on_all("write", lambda: leap(100.0 * (1 + rank)) or rank, doing="testing")


def test_the_deadline_counts_waiting_for_others_not_own_work(run_world: Callable[..., Any]) -> None:
    assert run_world(2, work_longer_than_the_deadline) == [[0, 1]] * 2


def leave_in_a_phase(rank: int, world_size: int, error: BaseException) -> str:
    def work() -> None:
        if rank == 1:
            raise error

    with pytest.raises(BaseException) as caught, Phases("save", path="/step") as phases:
        phases.to_coordinator("write", work, len, doing="testing")
    return repr(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_who_is_told_to_end_ends_and_the_others_are_told(run_world: Callable[..., Any], error: BaseException) -> None:
    other, own = run_world(2, leave_in_a_phase, error)
    assert own == repr(error)
    assert other.startswith(f"CheckpointFailedError('save', {{1: '{type(error).__name__}: ")


def leave_between_phases(rank: int, world_size: int, where: str) -> str:
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    is_interrupted = mock.patch.object(threading.Thread, "start", start_and_interrupt)
    with is_interrupted if (rank, where) == (1, "beginning") else nullcontext(), pytest.raises(BaseException) as caught:
        with Phases("save", path="/step", timeout_seconds=60) as phases:
            phases.on_all("plan", lambda: rank, doing="ranks planned")
            if rank == 1:
                raise KeyboardInterrupt
            phases.on_all("write", lambda: rank, doing="ranks wrote")
    store = _get_default_store()
    if rank == 0:
        store.set("rank 0 has heard", "")
    else:  # what rank 0 gave up comes to its end, else the group could not be destroyed
        store.wait(["rank 0 has heard"])
        all_gather_bytes(None, torch.zeros(1024, dtype=torch.uint8))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("beginning", " of /step while it began; nothing was changed"),
        ("between", " in phase plan of /step while ranks planned"),
    ],
)
def test_who_is_interrupted_between_two_phases_tells_the_others(
    run_world: Callable[..., Any], where: str, told: str
) -> None:
    text, own = run_world(2, leave_between_phases, where)
    assert own == "KeyboardInterrupt: "
    assert text.startswith(f"LostRankError: save failed{told}; all ranks answered a roll call; rank 1 left: KeyboardI")


def test_a_process_alone_needs_no_group() -> None:
    phases = Phases("save")
    assert (phases.rank, phases.size, phases.is_coordinator) == (0, 1, True)
    assert phases.to_coordinator("a", lambda: 3, lambda all_of: all_of, doing="") == [3]
    with pytest.raises(CheckpointFailedError, match=r"save failed on 1 rank\(s\): rank 0: ZeroDivisionError"):
        phases.on_all("b", lambda: 1 // 0, doing="")
