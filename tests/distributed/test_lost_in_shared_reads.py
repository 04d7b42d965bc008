"""Ranks that raise, are interrupted, stopped or die while ranks share reads: one error on all others, in time.

Every world has processes and a TCP store of its own, which rank 0 hosts, since ranks are killed and stopped. Rank 1 is
the culprit, in the second round.
"""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_worlds import GROUP_TIMEOUT_SECONDS, LATEST_SECONDS, end_rank, run_losing_world

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.share_reads import Rounds
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, TorchtitanExtError
from torchtitan_ext.ranks import watch

CULPRIT = 1
DEADLINE_SECONDS = 3.0
ROLL_CALL_SECONDS = 3.0
# Four rounds at least.
NUM_TENSORS, NUM_ELEMENTS = 12, 1 << 20


def strike(kind: str) -> None:
    if kind == "raise":
        raise OSError("boom")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[kind])


def struck_at(function: Any, kind: str, call: int) -> Any:
    """The function, before whose so manieth call the fault strikes."""
    calls: list[None] = []

    def struck(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            strike(kind)
        return function(*arguments, **options)

    return struck


def strike_when_received(kind: str, targets: list[torch.Tensor]) -> None:
    """In a thread: as soon as what rank 0 reads, the beginning of the file, has come from it."""
    while not float(targets[0][0]):
        time.sleep(0.0001)
    strike(kind)


def resting_after(function: Any) -> Any:
    """The function, behind which there is time for the fault: the load would end before an interrupt comes."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        time.sleep(1.0)
        return result

    return call


def inject(kind: str, phase: str, targets: list[torch.Tensor]) -> None:
    if phase == "preparing":
        Rounds._prepare = struck_at(Rounds._prepare, kind, 2)  # type: ignore[method-assign]
    elif phase == "exchange":
        Rounds._exchange = struck_at(Rounds._exchange, kind, 2)  # type: ignore[method-assign]
    elif phase == "moving":
        if kind == "interrupt":
            Rounds._exchange = resting_after(Rounds._exchange)  # type: ignore[method-assign]
        threading.Thread(target=strike_when_received, args=(kind, targets), daemon=True).start()
    else:
        read = struck_at(tte.FileReader.read_data, kind, 3)
        tte.FileReader.read_data = read  # type: ignore[method-assign]


def work(rank: int, port: int, channels: Any, path: Path, kind: str, phase: str) -> None:
    """One rank. Reports what the load raised and when, and what a later one does."""
    answers, _ = channels
    watch._ROLL_CALL_SECONDS = ROLL_CALL_SECONDS
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS))
    truth = {f"w{number}": torch.full((NUM_ELEMENTS,), number + 1.0) for number in range(NUM_TENSORS)}
    tte.save(truth, path)
    state = {fqn: torch.zeros_like(value) for fqn, value in truth.items()}
    if rank == CULPRIT:
        inject(kind, phase, list(state.values()))
    dist.barrier()
    for _ in (1, 2):
        start = time.monotonic()
        error: BaseException | None = None
        try:
            # Who raises says so, however long the others wait for it.
            seconds = 100.0 if kind in ("raise", "interrupt") else DEADLINE_SECONDS
            tte.load(state, path, share_reads=True, timeout_seconds=seconds)
            assert all(torch.equal(state[fqn], value) for fqn, value in truth.items())
        except (TorchtitanExtError, KeyboardInterrupt) as raised:
            error = raised
        answers.put((rank, error, time.monotonic() - start))
    end_rank(channels)


CASES = [("kill", "exchange"), ("kill", "moving"), ("stop", "moving"), ("kill", "reading"), ("stop", "exchange")]


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_a_rank_that_is_lost(tmp_path: Path, kind: str, phase: str) -> None:
    results, _ = run_losing_world(work, tmp_path / "step", kind, phase, kind=kind)
    assert [len(results[rank]) for rank in range(3)] == [2, 0 if kind == "kill" else 2, 2]
    for load in (0, 1):  # a later one on this group, too
        assert {type(outcomes[load][0]) for outcomes in results.values() if outcomes} == {LostRankError}
    first = {rank: outcomes[0] for rank, outcomes in results.items() if outcomes}
    assert len({str(error) for error, _ in first.values()}) == 1, first
    assert all(seconds < LATEST_SECONDS for rank, (_, seconds) in first.items() if rank != CULPRIT)
    text = str(first[0][0])
    assert text.startswith("load failed in phase read of ")
    assert " while tensors were read; these may be part-written: w0" in text
    assert "; rank(s) 1 did not answer a roll call; " in text


@pytest.mark.parametrize(("kind", "phase"), [("raise", "reading"), ("raise", "preparing"), ("interrupt", "moving")])
def test_a_rank_that_raises_is_the_same_error_on_all(tmp_path: Path, kind: str, phase: str) -> None:
    results, _ = run_losing_world(work, tmp_path / "step", kind, phase, kind=kind)
    errors = {rank: outcomes[0][0] for rank, outcomes in results.items()}
    if kind == "interrupt":
        assert isinstance(errors.pop(CULPRIT), KeyboardInterrupt)
    assert {type(error) for error in errors.values()} == {CheckpointFailedError}
    assert len({str(error) for error in errors.values()}) == 1, errors
    assert ("rank 1: KeyboardInterrupt" if kind == "interrupt" else "rank 1: OSError: boom") in str(errors[0])
    if kind == "raise":
        assert [outcomes[1][0] for outcomes in results.values()] == [None] * 3
