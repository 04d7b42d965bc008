"""Ranks that raise, sleep, are stopped or die in a phase of a save or load: one error on all others.

A world of which a rank is lost has processes and a TCP store of its own, which rank 0 hosts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_worlds import DEADLINE_SECONDS, end_rank, join_losing_world, run_losing_world, strike
from tier import SOAK
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, TorchtitanExtError


class Fault:
    """Strikes one rank when it first gets to a phase."""

    def __init__(self, kind: str, phase: str, rank: int) -> None:
        self.kind, self.phase, self.rank = kind, phase, rank
        # Who raises says so, however long the others wait for it.
        self.deadline_seconds = 60.0 if kind == "raise" else DEADLINE_SECONDS

    def at(self, phase: str) -> None:
        if not self.kind or phase != self.phase or dist.get_rank() != self.rank:
            return
        kind, self.kind = self.kind, ""
        strike(kind)


class FaultyWriter(FileSystemWriter):
    def __init__(self, path: Path, fault: Fault) -> None:
        super().__init__(path)
        self.fault = fault

    def prepare_local_plan(self, plan: Any) -> Any:
        self.fault.at("plan")
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.fault.at("write")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.fault.at("commit")
        super().finish(metadata=metadata, results=results)


class FaultyReader(FileSystemReader):
    def __init__(self, path: Path, fault: Fault) -> None:
        super().__init__(path)
        self.fault = fault

    def prepare_local_plan(self, plan: Any) -> Any:
        self.fault.at("plan")
        return super().prepare_local_plan(plan)

    def read_data(self, plan: Any, planner: Any) -> Any:
        # Values that are no tensors are read before, apart.
        if any(item.type == LoadItemType.TENSOR for item in plan.items):
            self.fault.at("read")
        return super().read_data(plan, planner)


class FaultyObject:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, Any]:
        self.fault.at("prepare")
        return {"place": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fault.at("take")


def state_of(fault: Fault) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full((2, 4), float(dist.get_rank()))
    return {"w": DTensor.from_local(own, mesh, [Shard(0)], run_check=False), "data": FaultyObject(fault)}


def operate(operation: str, state: dict[str, Any], path: Path, fault: Fault) -> None:
    if operation == "load":
        tte.load(state, path, storage_reader=FaultyReader(path, fault), timeout_seconds=fault.deadline_seconds)
    elif operation == "save":
        tte.save(state, path, storage_writer=FaultyWriter(path, fault), timeout_seconds=fault.deadline_seconds)
    else:
        writer = FaultyWriter(path, fault)
        tte.async_save(state, path, storage_writer=writer, timeout_seconds=fault.deadline_seconds).result()


def operate_twice(operation: str, path: Path, fault: Fault) -> list[Exception | None]:
    """What the operation raised, and a save after it."""
    # Made once: no mesh can be made after ranks are lost.
    state = state_of(fault)
    if operation == "load":
        tte.save({**state, "data": FaultyObject(Fault("", "", -1))}, path)
    dist.barrier()
    errors: list[Exception | None] = []
    for step in (path, path.with_name("next")):
        try:
            operate(operation if step == path else "save", state, step, fault)
            errors.append(None)
        except TorchtitanExtError as raised:
            errors.append(raised)
        fault.kind = ""
    return errors


def work(rank: int, port: int, channels: Any, size: int, operation: str, path: Path, fault: Fault) -> None:
    """One rank of a world that loses one."""
    join_losing_world(rank, size, port)
    for error in operate_twice(operation, path, fault):
        channels[0].put((rank, error))
    end_rank(channels)


def run(
    operation: str, kind: str, phase: str, path: Path, *, size: int = 3, culprit: int = 1
) -> tuple[dict[int, list[Any]], list[int]]:
    """Runs one world. Returns the errors of both operations by rank, and the exit codes."""
    fault = Fault(kind, phase, culprit)
    return run_losing_world(work, size, operation, path, fault, kind=kind, size=size, culprit=culprit)


def check_lost(results: dict[int, list[Any]], kind: str, phase: str, path: Path, operation: str, culprit: int) -> str:
    """All survivors, and who slept or went on, raise the same; a later save on this group too. Returns the text."""
    first = {rank: outcomes[0][0] for rank, outcomes in results.items() if outcomes}
    assert {type(error) for error in first.values()} == {LostRankError}
    # A stopped host of the store goes on with it: what the others could not ask is there again.
    is_host = kind == "stop" and culprit == 0
    texts = {str(error) for rank, error in first.items() if not (is_host and rank == 0)}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert len(text.splitlines()) == 1
    assert text.startswith(f"{'load' if operation == 'load' else 'save'} failed in phase {phase} of {path} while ")
    assert "this process group can serve no further save or load" in text
    later = {rank: outcomes[1][0] for rank, outcomes in results.items() if len(outcomes) > 1}
    assert later.keys() == first.keys()
    assert {type(error) for error in later.values()} == {LostRankError}
    return text


KINDS = ("sleep", "stop", "kill")
LOAD_PHASES = ("plan", "read", "take")
EVERY_CASE = [
    *[("save", kind, phase) for phase in ("prepare", "plan", "write") for kind in KINDS],
    *[("async_save", kind, "write") for kind in KINDS],
    *[("load", kind, phase) for phase in LOAD_PHASES for kind in KINDS],
]
# Each kind and each phase; make soak takes all pairs.
CASES = EVERY_CASE if SOAK > 1 else [*EVERY_CASE[:9:4], EVERY_CASE[11], *EVERY_CASE[12::4]]


@pytest.mark.nightly("lost")
@pytest.mark.parametrize(("operation", "kind", "phase"), CASES, ids=lambda value: value)
def test_a_rank_that_does_not_come(tmp_path: Path, operation: str, kind: str, phase: str) -> None:
    path = tmp_path / "step"
    results, _ = run(operation, kind, phase, path)
    assert [bool(results[rank]) for rank in range(3)] == [True, kind != "kill", True]
    text = check_lost(results, kind, phase, path, operation, culprit=1)
    assert ("these may be part-written: w, data" in text) == (phase == "read")
    if kind == "sleep":
        key = "data, " if phase in ("prepare", "take") else ""
        assert f"all ranks answered a roll call; rank 1 is still at work ({phase}, {key}for " in text
    else:
        assert "; rank(s) 1 did not answer a roll call; " in text


@pytest.mark.nightly("lost")
@pytest.mark.parametrize(("kind", "size"), [("sleep", 2), ("stop", 4), ("kill", 2)])
def test_a_coordinator_that_does_not_commit(tmp_path: Path, kind: str, size: int) -> None:
    """It hosts the store of the process groups, too: what it cannot answer is lost with it."""
    path = tmp_path / "step"
    results, _ = run("save", kind, "commit", path, size=size, culprit=0)
    text = check_lost(results, kind, "commit", path, "save", culprit=0)
    if kind == "sleep":
        assert "rank 0 is still at work (commit, for " in text
    else:
        assert (
            "rank(s) 0 did not answer a roll call; the store of the process groups, which rank 0 hosts, is lost" in text
        )


RAISING = [
    *[("save", phase) for phase in ("prepare", "plan", "write", "commit")],
    ("async_save", "write"),
    *[("load", phase) for phase in LOAD_PHASES],
]


def raise_in_each_phase(rank: int, world_size: int, folder: Path) -> list[list[Exception | None]]:
    outcomes = []
    for number, (operation, phase) in enumerate(RAISING):
        (folder / str(number)).mkdir(exist_ok=True)
        fault = Fault("raise", phase, 0 if phase == "commit" else 1)
        outcomes.append(operate_twice(operation, folder / str(number) / "step", fault))
    return outcomes


def test_a_rank_that_raises_is_the_same_error_and_the_group_goes_on(
    run_world: Callable[..., Any], tmp_path: Path
) -> None:
    of_ranks = run_world(3, raise_in_each_phase, tmp_path)
    for number, (_, phase) in enumerate(RAISING):
        errors = [outcomes[number][0] for outcomes in of_ranks]
        assert {type(error) for error in errors} == {CheckpointFailedError}
        assert len({str(error) for error in errors}) == 1
        culprit, named = (0, "write") if phase == "commit" else (1, phase)
        path = tmp_path / str(number) / "step"
        assert f"rank {culprit}: OSError: boom (in phase {named} of {path})" in str(errors[0])
        assert [outcomes[number][1] for outcomes in of_ranks] == [None] * 3
