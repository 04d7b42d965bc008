"""Saves and loads on one process group at once: each is whole, none waits for one that waits for it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_clock import FakeClock
from torch.distributed.checkpoint import FileSystemWriter

import torchtitan_ext as tte
from torchtitan_ext import clock
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import CheckpointFailedError, LostRankError
from torchtitan_ext.ranks import turns, watch
from torchtitan_ext.ranks.side_group import side_group_of
from torchtitan_ext.ranks.turns import Turn


class FakeGroup(dist.ProcessGroup):
    """Takes part in nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)


def save_beside_saves(rank: int, world_size: int, path: Path) -> list[float]:
    """Ranks get on with their threads at other speeds."""
    values = []
    for step in range(5):
        first = tte.async_save({"w": torch.full((4,), step), f"of_{rank}": rank}, path / f"first-{step}")
        second = tte.async_save({"w": torch.full((4,), 10 + step)}, path / f"second-{step}")
        tte.save({"w": torch.full((4,), 20 + step)}, path / f"third-{step}")
        first.result()
        second.result()
        for name in ("first", "second", "third"):
            state = {"w": torch.zeros(4, dtype=torch.int64)}
            tte.load(state, path / f"{name}-{step}")
            values.append(state["w"][3].item())
    assert not turns._last
    return values


def test_saves_in_threads_and_others_on_one_group(run_world: Callable[..., Any], tmp_path: Path) -> None:
    expected = [add + step for step in range(5) for add in (0, 10, 20)]
    assert run_world(2, save_beside_saves, tmp_path) == [expected] * 2


def begin_in_a_phase(rank: int, world_size: int) -> list[list[int]]:
    def begin_another() -> list[int]:
        with Phases("load") as inner:
            return inner.on_all("inner", lambda: rank, doing="testing")

    with Phases("save") as outer:
        return outer.on_all("outer", begin_another, doing="testing")


def test_what_begins_in_a_phase_waits_for_nobody(run_world: Callable[..., Any]) -> None:
    assert run_world(2, begin_in_a_phase) == [[[0, 1]] * 2] * 2


def test_the_next_begins_when_the_first_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, group, order = FakeClock(monkeypatch), FakeGroup(), []

    def take_turn(name: str, seconds: float) -> None:
        turn = Turn(group)
        clock.sleep(seconds)
        order.append((name, clock.now()))
        turn.end()

    fake.run({name: partial(take_turn, name, 10) for name in ("first", "second", "third")})
    assert [name for name, _ in order] == ["first", "second", "third"]
    assert not turns._last


def fail_to_begin(rank: int, world_size: int) -> bool:
    with mock.patch.object(watch, "_get_default_store", side_effect=RuntimeError("gone")), pytest.raises(RuntimeError):
        Phases("save")
    return not turns._last


def test_what_cannot_begin_holds_up_nobody(run_world: Callable[..., Any]) -> None:
    assert run_world(1, fail_to_begin) == [True]


def begin_without_a_thread(rank: int, world_size: int) -> tuple[str, bool]:
    no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with pytest.raises(CheckpointFailedError) as caught:
        with no_thread if rank == 1 else nullcontext(), Phases("save", path="/step", timeout_seconds=60) as phases:
            phases.on_all("plan", lambda: rank, doing="testing")
    assert not turns._last
    with Phases("save", timeout_seconds=60) as phases:
        return str(caught.value), phases.on_all("plan", lambda: rank, doing="testing") == [0, 1]


def test_a_rank_that_can_start_no_thread_tells_all(run_world: Callable[..., Any]) -> None:
    (text, goes_on), other = run_world(2, begin_without_a_thread)
    assert (text, goes_on) == other and goes_on
    assert text.startswith(
        "save failed on 1 rank(s): rank 1: RuntimeError: can't start new thread; raise the number of"
    )
    assert "(ulimit -u) or container (pids.max)" in text and text.endswith("(in phase plan of /step)")


def test_nobody_waits_for_one_that_is_lost() -> None:
    group = FakeGroup()
    first = Turn(group)
    first.check = mock.Mock(side_effect=LostRankError("save", "ranks wrote", None, (1,), "gone"))
    with pytest.raises(LostRankError, match="gone"):
        Turn(group)
    first.end()
    assert not turns._last


def wait_behind_a_write_that_hangs(rank: int, world_size: int, path: Path) -> str:
    hangs, group = threading.Event(), dist.new_group([0, 1])

    class Writer(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if rank == 1:
                hangs.wait()
            return super().write_data(plan, planner)

    state = {"w": torch.ones(2)}
    writer = Writer(path / "a")
    saved = tte.async_save(state, path / "a", storage_writer=writer, process_group=group, timeout_seconds=60)
    with pytest.raises(LostRankError) as caught:
        tte.save(state, path / "b", process_group=group, timeout_seconds=60)
    hangs.set()
    with pytest.raises(LostRankError):
        saved.result()
    if rank == 1:  # What rank 0 gave up comes to its end, else the group could not be destroyed.
        side = side_group_of(group)
        assert side is not None
        row = torch.empty(1024, dtype=torch.uint8)
        side.backend.allgather([list(torch.empty(2, 1024, dtype=torch.uint8))], [row]).wait()
    return str(caught.value)


@pytest.mark.nightly("lost")
def test_a_save_behind_one_that_hangs_is_lost_with_it(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, wait_behind_a_write_that_hangs, tmp_path)
    assert first == second and "rank 1 is still at work (write, for " in first


def test_an_interrupt_while_waiting_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup()
    first = Turn(group)
    monkeypatch.setattr(clock, "wait", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Turn(group)
    assert turns._last[group] is first
    first.end()
    assert not turns._last
