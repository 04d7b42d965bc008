"""Ranks that raise, sleep, are interrupted, stopped or die in a phase of a transfer: one error on all others.

A world of which a rank is lost has processes and a TCP store of its own, which rank 0 hosts. Ranks 0 and 1 have the
source, ranks 1 and 2 the target; rank 1 is the culprit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_worlds import (
    DEADLINE_SECONDS,
    end_rank,
    join_losing_world,
    run_losing_world,
    strike_when_filled,
    struck_before,
)
from tier import SOAK
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext import fingerprints, ops
from torchtitan_ext.errors import LostRankError, TorchtitanExtError, TransferFailedError
from torchtitan_ext.transfer import state_dicts

CULPRIT = 1
ROWS, COLUMNS = 4096, 1024


def inject(patch: pytest.MonkeyPatch, kind: str, phase: str, plan: Any, target: torch.Tensor) -> None:
    """Into the parts of a run."""
    if phase == "agree":
        plan._source.memory_to_read = struck_before(plan._source.memory_to_read, kind)
    elif phase == "exchange" and kind == "raise":
        plan._source.memory_to_read = lambda: [torch.ones(1, device="meta")]  # which the operator refuses
    elif phase == "exchange":
        plan._exchange = struck_before(plan._exchange, kind)
    elif phase == "moving":
        strike_when_filled(kind, target)
    elif phase.startswith("verify"):
        call = 1 if phase == "verify source" else 2
        struck = struck_before(fingerprints._table_of_sharded, kind, call)
        patch.setattr(fingerprints, "_table_of_sharded", struck)


def sharded(ranks: list[int], dim: int, value: float) -> DTensor:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    sizes = [ROWS, COLUMNS]
    sizes[dim] //= len(ranks)
    return DTensor.from_local(torch.full(sizes, value), mesh, [Shard(dim)], run_check=False)


def transfer_twice(rank: int, kind: str, phase: str) -> list[tuple[BaseException | None, int | None]]:
    """What the transfer raised and its version afterwards, and the same of another transfer."""
    source, target = sharded([0, 1], 0, 1.0), sharded([1, 2], 1, 0.0)
    # Who raises says so, however long the others wait for it.
    options = {
        "timeout_seconds": 60.0 if kind in ("raise", "interrupt") else DEADLINE_SECONDS,
        "bucket_bytes": 1 << 16,
    }
    sides: tuple[Any, Any] = ({"w": source} if rank < 2 else None, {"w": target} if rank > 0 else None)
    plan = None
    if phase != "plan":
        plan = tte.transfer.plan_reshard(*sides, **options)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == CULPRIT:
            if plan is None:
                struck = struck_before(state_dicts.describe_endpoint, kind)
                patch.setattr(state_dicts, "describe_endpoint", struck)
            else:
                inject(patch, kind, phase, plan, target.to_local())
        dist.barrier()
        for step in (1, 2):
            error: BaseException | None = None
            try:
                plan = plan or tte.transfer.plan_reshard(*sides, **options)
                plan.run(version=step, verify=phase.startswith("verify"))
            except (TorchtitanExtError, KeyboardInterrupt) as raised:
                error = raised
            outcomes.append((error, None if plan is None else plan.version))
            if phase == "exchange" and kind == "raise":
                plan = None  # the source of the first one stays broken
    return outcomes


def work(rank: int, port: int, channels: Any, kind: str, phase: str) -> None:
    """One rank of a world that loses one."""
    join_losing_world(rank, 3, port)
    for outcome in transfer_twice(rank, kind, phase):
        channels[0].put((rank, *outcome))
    end_rank(channels)


PHASES = ("plan", "agree", "verify source", "exchange", "moving", "verify target")
KINDS = ("sleep", "stop", "kill")
# No sleep while boxes move: the operator runs on beside the thread.
EVERY_CASE = [(kind, phase) for phase in PHASES for kind in KINDS if (kind, phase) != ("sleep", "moving")]
# Each kind and each phase; make soak takes all pairs.
FEW_CASES = list(zip(KINDS * 2, PHASES, strict=False))
CASES = EVERY_CASE if SOAK > 1 else [*FEW_CASES, ("kill", "moving")]


@pytest.mark.nightly("lost")
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_a_rank_that_does_not_come(kind: str, phase: str) -> None:
    results, _ = run_losing_world(work, kind, phase, kind=kind)
    assert [len(results[rank]) for rank in range(3)] == [2, 0 if kind == "kill" else 2, 2]
    for transfer in (0, 1):  # a later one on this group, too
        errors = [outcomes[transfer][0] for outcomes in results.values() if outcomes]
        assert {type(error) for error in errors} == {LostRankError}
        assert {outcomes[transfer][1] for outcomes in results.values() if outcomes} == {None}
    first = {rank: outcomes[0] for rank, outcomes in results.items() if outcomes}
    assert len({str(error) for error, _ in first.values()}) == 1, first
    text = str(first[0][0])
    assert text.endswith("can serve no further transfer: make a new one and plan again, or restart")
    named = {"moving": "exchange"}.get(phase, phase.split()[0])
    assert text.startswith(f"reshard failed in phase {named} while ranks ")
    assert ("the target may be part-written: w" in text) == (named == "exchange")
    if kind != "sleep":
        assert "; rank(s) 1 did not answer a roll call; " in text


def check_raised(outcomes: list[list[tuple[BaseException | None, int | None]]], kind: str, phase: str) -> None:
    """One error on all ranks, and the group goes on."""
    errors: dict[int, Any] = {rank: of_rank[0][0] for rank, of_rank in enumerate(outcomes)}
    if kind == "interrupt":
        assert isinstance(errors.pop(CULPRIT), KeyboardInterrupt)
    assert {type(error) for error in errors.values()} == {TransferFailedError}
    assert len({str(error) for error in errors.values()}) == 1, errors
    assert [of_rank[0][1] for of_rank in outcomes] == [None] * 3
    named = {"moving": "exchange"}.get(phase, phase.split()[0])
    assert f"in phase {named}: " in str(errors[0])
    raised = "rank 1: KeyboardInterrupt" if kind == "interrupt" else "rank 1: OSError: boom"
    assert ("rank 1: ValueError: " if (kind, named) == ("raise", "exchange") else raised) in str(errors[0])
    assert errors[0].part_written == (("w",) if named == "exchange" else ())
    assert [of_rank[1] for of_rank in outcomes] == [(None, 2)] * 3


def raise_in_a_transfer(rank: int, world_size: int, phase: str) -> list[tuple[BaseException | None, int | None]]:
    return transfer_twice(rank, "raise", phase)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "moving"])
def test_a_rank_that_raises_is_the_same_error_and_the_group_goes_on(run_world: Callable[..., Any], phase: str) -> None:
    check_raised(run_world(3, raise_in_a_transfer, phase), "raise", phase)


@pytest.mark.nightly("lost")
@pytest.mark.parametrize("phase", ["agree", "moving"])
def test_a_rank_that_is_interrupted_is_the_same_error_and_the_group_goes_on(phase: str) -> None:
    results, exit_codes = run_losing_world(work, "interrupt", phase, kind="interrupt")
    check_raised([results[rank] for rank in range(3)], "interrupt", phase)
    assert exit_codes == [0] * 3


class Broken:
    """An exchange that fails before it sends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise OSError("no link")


def fail_before_sending(rank: int, world_size: int, culprit: int) -> list[str]:
    """One rank raises, all others wait for what it does not send."""
    mesh = DeviceMesh("cpu", torch.arange(world_size), _init_backend=False)
    rows, columns = torch.full((5, world_size), rank + 1.0), torch.zeros(5 * world_size, 1)
    source = {"w": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)}
    target = {"w": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False)}
    plan = tte.transfer.plan_reshard(source, target, dist.new_group(), timeout_seconds=DEADLINE_SECONDS)
    texts = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferFailedError) as caught:
        if rank == culprit:
            patch.setattr(ops, "PlannedExchange", Broken)
        plan.run(version=1)
    assert plan.version is None
    texts.append(str(caught.value))
    with pytest.raises(LostRankError) as lost:
        plan.run(version=2)
    return [*texts, str(lost.value)]


@pytest.mark.nightly("lost")
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (4, 1)])
def test_who_fails_before_it_sends_is_the_error_of_all(run_world: Any, world_size: int, culprit: int) -> None:
    results = run_world(world_size, fail_before_sending, culprit)
    assert all(texts == results[0] for texts in results)
    assert results[0][0] == (
        f"reshard failed on 1 rank(s) in phase exchange: rank {culprit}: OSError: no link; this process group can "
        "serve no further transfer: make a new one and plan again, or restart. The target may be part-written, run it "
        "again or fill it anew: w"
    )
    assert "the backend of rank" in results[0][1]
