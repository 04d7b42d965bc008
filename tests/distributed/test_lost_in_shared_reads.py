"""Ranks that raise, are interrupted, stopped or die while ranks share reads: one error on all others.

A world of which a rank is lost has processes and a TCP store of its own, which rank 0 hosts. Rank 1 is the culprit, in
the second round.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_worlds import (
    DEADLINE_SECONDS,
    end_rank,
    join_losing_world,
    resting_after,
    run_losing_world,
    strike_when_filled,
    struck_before,
)

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.share_reads import Rounds
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, TorchtitanExtError

CULPRIT = 1
# Four rounds at least.
NUM_TENSORS, NUM_ELEMENTS = 12, 1 << 20


@contextmanager
def injected(kind: str, phase: str, targets: list[torch.Tensor]) -> Iterator[None]:
    """The culprit, into which a fault strikes."""
    with pytest.MonkeyPatch.context() as patch:
        if phase == "preparing":
            patch.setattr(Rounds, "_prepare", struck_before(Rounds._prepare, kind, 2))
        elif phase == "exchange":
            patch.setattr(Rounds, "_exchange", struck_before(Rounds._exchange, kind, 2))
        elif phase == "moving":
            if kind == "interrupt":  # the load would end before it comes
                patch.setattr(Rounds, "_exchange", resting_after(Rounds._exchange))
            strike_when_filled(kind, targets[0])  # with the beginning of the file, which rank 0 reads
        else:
            patch.setattr(tte.FileReader, "read_data", struck_before(tte.FileReader.read_data, kind, 3))
        yield


def load_twice(rank: int, path: Path, kind: str, phase: str) -> list[BaseException | None]:
    """What the load raised, and a later one."""
    truth = {f"w{number}": torch.full((NUM_ELEMENTS,), number + 1.0) for number in range(NUM_TENSORS)}
    tte.save(truth, path)
    state = {fqn: torch.zeros_like(value) for fqn, value in truth.items()}
    dist.barrier()
    # Who raises says so, however long the others wait for it.
    seconds = 60.0 if kind in ("raise", "interrupt") else DEADLINE_SECONDS
    errors: list[BaseException | None] = []
    with injected(kind, phase, list(state.values())) if rank == CULPRIT else nullcontext():
        for _ in (1, 2):
            try:
                tte.load(state, path, share_reads=True, timeout_seconds=seconds)
                assert all(torch.equal(state[fqn], value) for fqn, value in truth.items())
                errors.append(None)
            except (TorchtitanExtError, KeyboardInterrupt) as raised:
                errors.append(raised)
    return errors


def work(rank: int, port: int, channels: Any, path: Path, kind: str, phase: str) -> None:
    """One rank of a world that loses one."""
    join_losing_world(rank, 3, port)
    for error in load_twice(rank, path, kind, phase):
        channels[0].put((rank, error))
    end_rank(channels)


CASES = [("kill", "exchange"), ("kill", "moving"), ("stop", "moving"), ("kill", "reading"), ("stop", "exchange")]


@pytest.mark.nightly("lost")
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_a_rank_that_is_lost(tmp_path: Path, kind: str, phase: str) -> None:
    results, _ = run_losing_world(work, tmp_path / "step", kind, phase, kind=kind)
    assert [len(results[rank]) for rank in range(3)] == [2, 0 if kind == "kill" else 2, 2]
    for load in (0, 1):  # a later one on this group, too
        assert {type(outcomes[load][0]) for outcomes in results.values() if outcomes} == {LostRankError}
    first = {str(outcomes[0][0]) for outcomes in results.values() if outcomes}
    assert len(first) == 1, first
    (text,) = first
    assert text.startswith("load failed in phase read of ")
    assert " while tensors were read; these may be part-written: w0" in text
    assert "; rank(s) 1 did not answer a roll call; " in text


@pytest.mark.nightly("lost")
def test_a_rank_that_is_interrupted_is_the_same_error_on_all_others(tmp_path: Path) -> None:
    results, _ = run_losing_world(work, tmp_path / "step", "interrupt", "moving", kind="interrupt")
    errors = {rank: outcomes[0][0] for rank, outcomes in results.items()}
    assert isinstance(errors.pop(CULPRIT), KeyboardInterrupt)
    assert {type(error) for error in errors.values()} == {CheckpointFailedError}
    assert len({str(error) for error in errors.values()}) == 1, errors
    assert "rank 1: KeyboardInterrupt" in str(errors[0])


def raise_in_a_load(rank: int, world_size: int, path: Path, phase: str) -> list[BaseException | None]:
    return load_twice(rank, path, "raise", phase)


@pytest.mark.parametrize("phase", ["reading", "preparing"])
def test_a_rank_that_raises_is_the_same_error_on_all(run_world: Callable[..., Any], tmp_path: Path, phase: str) -> None:
    first, later = zip(*run_world(3, raise_in_a_load, tmp_path / "step", phase), strict=True)
    assert {type(error) for error in first} == {CheckpointFailedError}
    assert len({str(error) for error in first}) == 1, first
    assert "rank 1: OSError: boom" in str(first[0])
    assert later == (None, None, None)
