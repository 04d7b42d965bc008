"""Traces: one file of all ranks, in the format of Chrome and Perfetto, whether the operation ends well or not."""

import json
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError
from torchtitan_ext.metrics import Span, Trace

SAVE = ["prepare", "plan", "write"]
LOAD = ["prepare", "plan", "read values", "read", "verify", "take"]


def sharded(world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {"w": distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])}


def spans_of(path: Path, rank: int) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def phases_of(spans: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the spans inside of each phase; spans either follow each other or lie in each other."""
    phases: dict[str, list[str]] = {}
    end = 0.0
    for span, following in pairwise([*spans, {"ts": float("inf")}]):
        assert span["dur"] >= 0
        if span["ts"] >= end:
            end = span["ts"] + span["dur"]
            phases[span["name"]] = []
        else:
            # 1 microsecond: times of day are no finer as floats.
            assert span["ts"] + span["dur"] <= min(end, following["ts"]) + 1
            phases[list(phases)[-1]].append(span["name"])
    return phases


def save_and_load(rank: int, world_size: int, folder: Path) -> None:
    state = sharded(world_size)
    tte.save(state, folder / "run" / "step-1", trace=folder / "save.json")
    tte.load(state, folder / "run", step="latest", trace=str(folder / "load.json"))
    tte.async_save(state, folder / "other", trace=folder / "traces" / "async.json").result()


def test_all_ranks_are_in_one_file(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, save_and_load, tmp_path)
    own, both = ["own part"], ["own part", "coordinator's part"]
    save, load, in_thread = tmp_path / "save.json", tmp_path / "load.json", tmp_path / "traces" / "async.json"
    assert phases_of(spans_of(save, 0)) == {"prepare": own, "plan": both, "write": ["own part", "commit"]}
    assert phases_of(spans_of(save, 1)) == dict.fromkeys(SAVE, own)
    assert phases_of(spans_of(load, 0)) == {"choose": both} | dict.fromkeys(LOAD, own) | {"plan": both}
    assert phases_of(spans_of(load, 1)) == dict.fromkeys(["choose", *LOAD], own)
    assert list(phases_of(spans_of(in_thread, 1))) == ["prepare", "stage", "connect", "plan", "write"]
    content = json.loads(save.read_text())
    names = {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert content["otherData"] == {"operation": "save", "path": str(tmp_path / "run" / "step-1")}
    assert min(span["ts"] for span in spans_of(save, 0)) < 1e6 and not any("args" in span for span in spans_of(save, 0))


class BadDisk(tte.FileWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.rank == 1:
            raise OSError("bad sector")
        return super().write_data(plan, planner)


def fail_to_save(rank: int, world_size: int, folder: Path) -> None:
    with pytest.raises(CheckpointFailedError, match="bad sector"):
        tte.save(sharded(world_size), storage_writer=BadDisk(folder / "step"), trace=folder / "failed.json")


def test_a_failed_save_shows_where(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, fail_to_save, tmp_path)
    failed = {
        (rank, span["name"]): span["args"]["error"]
        for rank in (0, 1)
        for span in spans_of(tmp_path / "failed.json", rank)
        if "args" in span
    }
    assert failed[1, "own part"] == "OSError: bad sector"
    assert "rank 1: OSError: bad sector" in failed[0, "write"]


def trace_one_rank(rank: int, world_size: int, folder: Path) -> None:
    for traced in (0, 1):
        path = folder / f"of-{traced}.json" if rank == traced else None
        tte.save(sharded(world_size), folder / f"step-{traced}", trace=path)


def test_ranks_may_disagree_on_tracing(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, trace_one_rank, tmp_path)
    assert list(phases_of(spans_of(tmp_path / "of-0.json", 0))) == SAVE
    assert spans_of(tmp_path / "of-0.json", 1) == []
    assert not (tmp_path / "of-1.json").exists()  # the first rank writes
    assert (tmp_path / "step-1" / ".metadata").exists()


def test_an_interrupted_phase_ends_with_the_file(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    with trace.span("write"):
        trace.add([Span(1, "write", trace.unsent()[0].begin_seconds)])
    trace.write("save", "step")
    (own,), (other,) = spans_of(trace.path, 0), spans_of(trace.path, 1)
    assert other["ts"] == own["ts"] and other["dur"] >= own["dur"]


@pytest.mark.parametrize("name", ["file/trace.json", "no\0name"])
def test_a_trace_that_cannot_be_written_is_a_warning(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the trace of a save is not written: "):
        tte.save({"w": torch.ones(4)}, tmp_path / "step", trace=tmp_path / name)
    assert (tmp_path / "step" / ".metadata").exists()


def test_a_trace_that_cannot_be_written_makes_no_save_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the trace of")
        tte.save({"w": torch.ones(4)}, tmp_path / "step", trace=tmp_path / "file" / "trace.json")
    assert "UserWarning: the trace of a save is not written" in capsys.readouterr().err


@pytest.mark.parametrize("operation", [tte.save, tte.load, tte.async_save])
def test_anything_but_a_path_is_refused(operation: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{operation.__name__}: got trace=True, expected a file"):
        operation({"w": torch.ones(4)}, tmp_path, trace=True)
