"""What fits into the time that is left, and ranks that agree on the step at which they stop."""

import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eventually import eventually
from leaps import leaping
from lost_worlds import end_rank, run_losing_world
from signals import die, send
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import torchtitan_ext as tte
from torchtitan_ext.errors import LostRankError, TorchtitanExtError
from torchtitan_ext.ranks.boundaries import Boundaries
from torchtitan_ext.runs.preemption import RankTimes, what_fits
from torchtitan_ext.storage.native import file_writer

# ---- what fits ----

SLOW = RankTimes(passed=9, step_seconds=2, staging_seconds=1, saving_seconds=6)
AHEAD = RankTimes(passed=10, step_seconds=1)
PENDING = RankTimes(passed=10, step_seconds=1, staging_seconds=1, saving_seconds=6, pending_seconds=2)


@pytest.mark.parametrize(
    ("times", "left", "saves", "told"),
    [
        ([SLOW, AHEAD], 11.0, True, "save this step and stop: 4.0 s to come here and 7.0 s for a new one; 11.0 s"),
        ([SLOW, AHEAD], 10.9, True, "may take too long: 4.0 s to come here and 7.0 s for a new one; 10.9 s"),
        ([PENDING, AHEAD], 11.0, True, "1.0 s to come here, 3.0 s for the pending save and 7.0 s for a new one"),
        ([PENDING, AHEAD], 10.9, False, "finish the pending save alone and stop: .* do not fit; 10.9 s are left"),
        ([PENDING, AHEAD], None, True, "wait for the pending save, save this step, and stop; nobody has said"),
        ([AHEAD], 0.1, True, "no save of this run has been measured yet"),
    ],
)
def test_what_fits(times: list[RankTimes], left: float | None, saves: bool, told: str) -> None:
    verdict = what_fits(times, left)
    assert (verdict.step, verdict.saves) == (11, saves)
    assert re.search(told, verdict.text), verdict.text


# ---- one process ----


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def train(manager: tte.CheckpointManager, act: Callable[[int], object], num_steps: int = 400) -> int:
    """Trains until it is to stop, and returns the step."""
    step = manager.resume(state_of(0))
    while step < num_steps and not manager.should_stop:
        step += 1
        act(step)
        if manager.should_save(step):
            manager.save(state_of(step), step)
    return step


def boundaries_of(manager: tte.CheckpointManager) -> Boundaries:
    assert manager._preemption is not None
    return manager._preemption._boundaries


def wait_for_report(manager: tte.CheckpointManager) -> None:
    """Returns when the thread of this rank has heard of a request, and told which boundary the rank has passed."""
    eventually(lambda: boundaries_of(manager)._has_reported)


def wait_for_questions(manager: tte.CheckpointManager) -> None:
    """Returns when the thread of this rank has once more looked for signals and requests, from beginning to end."""
    inbox = boundaries_of(manager)._inbox
    ended: list[str] = []
    wait = inbox.wait

    def noted(seconds: float) -> str:
        what = wait(seconds)
        ended.append(what)
        return what

    inbox.wait = noted  # type: ignore[method-assign]
    for number in range(3):  # the first one may have begun before
        inbox.wake()
        eventually(lambda number=number: len(ended) > number)


def test_a_run_of_one_process_stops_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: own.append(number))
    terminate = signal.getsignal(signal.SIGTERM)
    wakeup = signal.set_wakeup_fd(-1)
    try:

        def act(step: int) -> None:
            if step == 3:
                for _ in range(3):  # a second one, and a third, change nothing
                    send(signal.SIGUSR1)
                wait_for_report(manager)

        with tte.CheckpointManager(tmp_path, every=50, signals=("SIGTERM", "SIGUSR1"), grace_seconds=60) as manager:
            end = train(manager, act)
            assert manager.should_stop and end == 3
            assert [manager.should_save(step) for step in (end, end + 1, 50)] == [True, False, True]
        assert manager.latest == end
        assert own and set(own) == {signal.SIGUSR1}
        assert signal.getsignal(signal.SIGTERM) == terminate and signal.set_wakeup_fd(-1) == -1
        told = [record.getMessage() for record in caplog.records if record.name.endswith("preemption")]
        assert told[0] == f"{tmp_path}: SIGUSR1 had a handler before, which is called too"
        assert len(told) == 2 and told[1].startswith(
            f"{tmp_path}: SIGUSR1 at rank 0: at step {end} all ranks save this step and stop; "
        )
        send(signal.SIGUSR1)
        with tte.CheckpointManager(tmp_path, every=50, signals=["SIGTERM"]) as manager:
            assert train(manager, lambda _: None, end + 5) == end + 5 and not manager.should_stop
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(wakeup)


def test_a_request_during_a_resume_saves_the_next_step(tmp_path: Path) -> None:
    tte.save(state_of(70), tmp_path / "step-70")
    with tte.CheckpointManager(tmp_path, grace_seconds=60) as manager:
        manager.request_save()
        manager.resume(state_of(0))
        wait_for_report(manager)
        assert train(manager, lambda _: None) == 71 and manager.should_stop
    assert len(manager.steps()) == 2


def test_a_pending_save_that_fills_the_time_is_finished_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_write = threading.Event()
    write = file_writer.FileWriter.write_data
    monkeypatch.setattr(file_writer.FileWriter, "write_data", lambda *given: (may_write.wait(60), write(*given))[1])
    may_write.set()
    with tte.CheckpointManager(tmp_path, every=1, grace_seconds=60) as manager:
        manager.save(state_of(1), 1)
        manager.wait()
        assert manager._preemption is not None
        manager._preemption._saving_seconds = 1e6  # as if it had taken that long
        may_write.clear()
        assert manager.should_save(2)
        manager.save(state_of(2), 2)
        manager.request_save()
        wait_for_report(manager)
        assert not manager.should_save(3) and manager.should_stop
        may_write.set()
    assert manager.steps() == [1, 2]
    assert "finish the pending save alone and stop" in caplog.text


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ("SIGTERM", "got signals='SIGTERM'"),
        (["SIGNONE"], "expected names of signals"),
        (["SIGTERM", "SIGKILL"], "expected names of signals that a process can take"),
    ],
)
def test_wrong_signals(tmp_path: Path, signals: Any, told: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((TypeError, ValueError), match=told):
        tte.CheckpointManager(tmp_path, signals=signals)
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_that_cannot_be_taken(tmp_path: Path) -> None:
    refused: list[str] = []

    def make() -> None:
        try:
            tte.CheckpointManager(tmp_path, signals=["SIGTERM"])
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "Python takes them in the main thread only" in refused[0]
    with pytest.raises(ValueError, match="got grace_seconds=-1"):
        tte.CheckpointManager(tmp_path, grace_seconds=-1)
    with pytest.raises(ValueError, match="this manager does not listen"):
        tte.CheckpointManager(tmp_path).request_save()


def test_a_fork_leaves_the_signals_of_the_job(tmp_path: Path) -> None:
    """Else what ends a child, such as a worker of a data loader, would ask the job to end."""
    with tte.CheckpointManager(tmp_path, signals=["SIGTERM"]) as manager:
        has_begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begins, b"!")
            while True:
                signal.pause()
        os.read(has_begun, 1)
        send(signal.SIGTERM, child)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        os.close(has_begun)
        os.close(begins)
        wait_for_questions(manager)
        assert not any(manager.should_save(step) for step in (1, 2)) and not manager.should_stop


# ---- ranks ----


def stop_together(rank: int, world_size: int, path: str) -> list[tuple[int, bool]]:
    """Ranks do not meet in a step, and some are many steps ahead when they hear of the request."""
    ends = []
    for asker in (world_size - 1, 0):
        with tte.CheckpointManager(f"{path}/{asker}", every=1000, grace_seconds=60) as manager:

            def act(step: int, asker: int = asker, manager: tte.CheckpointManager = manager) -> None:
                if rank == asker and step == 20:
                    manager.request_save()
                if step == 20 + 10 * rank:
                    wait_for_report(manager)

            ends.append((train(manager, act, 10**6), manager.should_stop))
            dist.barrier()
            assert manager.wait() is not None and manager.steps() == [ends[-1][0]]
    return ends


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_stop_at_one_step(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    found = run_world(world_size, stop_together, str(tmp_path))
    assert all(ends == found[0] for ends in found) and all(stopped for _, stopped in found[0])


def hear_in_a_collective(rank: int, world_size: int, path: str) -> int:
    """Rank 0 gets a signal while it waits in a collective for rank 1, which comes when it is told to stop."""
    with tte.CheckpointManager(path, signals=["SIGUSR1"]) as manager:
        told = torch.zeros(1)
        step = 0
        store = _get_default_store()
        if rank == 0:
            store.set("pid of rank 0", str(os.getpid()))
            dist.recv(told, src=1)
        while not manager.should_stop:
            step += 1
            if rank == 1 and step == 6:
                send(signal.SIGUSR1, int(store.get("pid of rank 0")))
                wait_for_report(manager)
            manager.should_save(step)
        if rank == 1:
            dist.send(told, dst=0)
        dist.barrier()
        return step


def test_a_rank_hears_a_signal_in_a_collective(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, hear_in_a_collective, str(tmp_path))
    assert first == second == 6


def count_collectives(rank: int, world_size: int, path: str) -> list[int]:
    """Collectives of the group in steps without a request, while the threads ask the store, and in one barrier."""
    group: Any = dist.group.WORLD
    dist.barrier()
    counts = [group._get_sequence_number_for_group()]
    with tte.CheckpointManager(path, signals=["SIGTERM"]) as manager:
        train_on(manager, 50)
        wait_for_questions(manager)
        train_on(manager, 50)
    counts.append(group._get_sequence_number_for_group())
    dist.barrier()
    counts.append(group._get_sequence_number_for_group())
    return [counts[1] - counts[0], counts[2] - counts[1]]


def test_steps_without_a_request_send_nothing_on_the_training_group(
    run_world: Callable[..., Any], tmp_path: Path
) -> None:
    assert run_world(2, count_collectives, str(tmp_path)) == [[0, 1]] * 2


def leave_early(rank: int, world_size: int, path: str) -> tuple[int, bool]:
    """Rank 1 has closed its manager when rank 0 is asked: rank 0 goes on to its end."""
    manager = tte.CheckpointManager(path, grace_seconds=60)
    if rank == 1:
        manager.close()
    dist.barrier()
    if rank == 0:
        manager.request_save()
        wait_for_report(manager)
    end = train_on(manager, 30) if rank == 0 else 30
    manager.close()
    dist.barrier()
    return end, manager.should_stop


def train_on(manager: tte.CheckpointManager, num_steps: int) -> int:
    for step in range(1, num_steps + 1):
        manager.should_save(step)
    return num_steps


def test_ranks_that_have_ended_are_not_waited_for(run_world: Callable[..., Any], tmp_path: Path) -> None:
    assert run_world(2, leave_early, str(tmp_path)) == [(30, False)] * 2


def without_the_coordinator(rank: int, world_size: int, path: str) -> str:
    """Rank 0 never listens: another rank says so in its place."""
    error = ""
    store = _get_default_store()
    if rank > 0:
        with leaping() as leap:
            manager = tte.CheckpointManager(path, grace_seconds=60)
            manager.request_save()
            own = PrefixStore(boundaries_of(manager)._prefix, store)
            eventually(lambda: own.check([f"report/{other}" for other in (1, 2)]))
            leap(1000.0)
            with pytest.raises(LostRankError) as raised:
                train_on(manager, 10**6)
            error = str(raised.value)
            manager.close()
    dist.barrier()
    return error


def test_a_coordinator_that_does_not_listen(run_world: Callable[..., Any], tmp_path: Path) -> None:
    _, *others = run_world(3, without_the_coordinator, str(tmp_path))
    assert others[0] == others[1]
    assert "while ranks agreed on the step to stop at; rank(s) 0 did not answer a roll call" in others[0]
    assert "waited 60 s for them after request_save at rank" in others[0] and str(tmp_path) in others[0]


def lose_a_rank(rank: int, port: int, channels: Any, path: str, kind: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    manager = tte.CheckpointManager(path, signals=["SIGTERM"], grace_seconds=4)
    answers, _ = channels
    dist.barrier()
    if rank == 1:
        die() if kind == "kill" else send(signal.SIGSTOP)
    if rank == 2:
        send(signal.SIGTERM)
    for _ in range(2):  # and the next boundary raises the same
        try:
            train_on(manager, 10**6)
        except TorchtitanExtError as error:
            answers.put((rank, type(error).__name__, str(error)))
    end_rank(channels)
    os._exit(0)


@pytest.mark.nightly("lost")
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_rank_that_is_lost_before_it_reports(tmp_path: Path, kind: str) -> None:
    results, _ = run_losing_world(lose_a_rank, str(tmp_path), kind, kind=kind)
    told = {answer for answers in results.values() for answer in answers}
    assert len(told) == 1 and len(results[0]) == len(results[2]) == 2
    ((name, text),) = told
    assert name == "LostRankError" and "rank(s) 1 did not answer a roll call" in text and "SIGTERM at rank 2" in text


def test_a_rank_of_a_job_without_a_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="or leave signals and grace_seconds out"):
        tte.CheckpointManager(tmp_path, signals=["SIGTERM"])
