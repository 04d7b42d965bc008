"""Saves that storage refuses on a rank or all: the same outcome on every rank, never half a step, training goes on."""

import gc
import os
import resource
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.errors import CheckpointFailedError, ReplicaMismatchError, WrongValueError

# Saves of this size meet the limit, the index and the metadata of a save do not.
ROWS = 40_000
LIMIT_BYTES = 100_000


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((ROWS, 4), float(step))
    return {"w": tte.distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


class Full:
    """A disk that is full for some ranks: files beyond a limit cannot be written."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._is_full = dist.get_rank() in ranks
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        if self._is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, self._before[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def save(kind: str, stager: CpuStager | None, *arguments: Any, **options: Any) -> Any:
    if kind == "save":
        return tte.save(*arguments, **options)
    return tte.async_save(*arguments, stager=stager, **options).result(timeout=120)


def train(rank: int, world_size: int, folder: Path, kind: str, full_ranks: tuple[int, ...]) -> list[Any]:
    """Seven saves, of which those from the second to the fifth meet a full disk."""
    run = folder / "run"
    stager = CpuStager(host_memory_bytes=100_000 if kind == "portions" else None)
    seen: list[Any] = []
    for step in range(1, 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with Full(full_ranks if 2 <= step <= 5 else ()):
                    state = state_of(step)
                    result = save(kind, stager, state, run / f"step-{step}", on_error="warn", retries=1)
                seen.append((result.path, result.error, bool(result.save_id)))
            except CheckpointFailedError as error:
                seen.append(str(error))
        own = [str(warning.message) for warning in caught if "nothing was saved" in str(warning.message)]
        assert len(own) == (rank == 0 and step in (2, 3))
    return seen


def loaded_steps(run: Path) -> list[int]:
    found = []
    for path in sorted(run.iterdir()):
        state = {"w": torch.zeros(ROWS, 4), "step": -1}
        try:
            tte.load(state, path, no_dist=True)
        except tte.errors.TorchtitanExtError:
            continue
        except FileNotFoundError:
            continue
        assert bool((state["w"] == state["step"]).all())
        found.append(int(state["step"]))
    return found


@pytest.mark.parametrize(
    ("world_size", "kind", "full_ranks"),
    [(1, "save", (0,)), (2, "save", (1,)), (2, "async", (0, 1)), (2, "portions", (1,)), (4, "save", (0, 2))],
)
def test_a_full_disk(run_world, tmp_path: Path, world_size: int, kind: str, full_ranks: tuple[int, ...]) -> None:
    seen = run_world(world_size, train, tmp_path, kind, full_ranks)
    assert all(other == seen[0] for other in seen)
    run = tmp_path / "run"
    for step in (1, 6, 7):
        assert seen[0][step - 1] == (str(run / f"step-{step}"), "", True)
    for step, count in ((2, 1), (3, 2)):
        path, error, has_id = seen[0][step - 1]
        assert (path, has_id) == ("", False) and f"nothing was saved ({count} in a row, 3 raise)" in error
        assert f"rank {full_ranks[0]}" in error and "File too large" in error
    assert "File too large" in seen[0][3] and "File too large" in seen[0][4]  # the third in a row, and more, are raised
    assert loaded_steps(run) == [1, 6, 7]
    assert tte.load({"step": 0}, run, step="latest", no_dist=True, planner=tte.LoadPlanner()) is None


def save_with_fallback(rank: int, world_size: int, folder: Path, kind: str) -> list[Any]:
    run, other = folder / "run", folder / "other"
    stager = CpuStager(process=kind == "child")
    seen: list[Any] = []
    if rank == 0:
        (folder / "file").write_text("no directory")
    dist.barrier()
    for step, path in ((1, run), (2, folder / "file"), (3, run)):
        options = {"on_error": "raise", "fallback": other, "keep": 2}
        result = save(kind, stager, state_of(step), path / f"step-{step}", **options)
        seen.append(result.path)
    with pytest.raises(CheckpointFailedError) as caught:
        save(kind, stager, state_of(4), folder / "file" / "step-4", fallback=folder / "file" / "more")
    seen.append(str(caught.value))
    with pytest.raises(ReplicaMismatchError):  # the state is at fault: no other place is tried
        save(kind, stager, {"x": rank}, run / "step-5", on_error="warn", fallback=other, retries=3)
    stager.close()
    return seen


@pytest.mark.parametrize("kind", ["save", "async", "child"])
def test_another_directory_takes_what_the_first_refuses(run_world, tmp_path: Path, kind: str) -> None:
    seen = run_world(2, save_with_fallback, tmp_path, kind)
    assert seen[0] == seen[1]
    run, other = tmp_path / "run", tmp_path / "other"
    assert seen[0][:3] == [str(run / "step-1"), str(other / "step-2"), str(run / "step-3")]
    assert "Not a directory" in seen[0][3]
    assert loaded_steps(run) == [1, 3] and loaded_steps(other) == [2]
    for step, expected in (("latest", 3), ("last-good", 3), (2, 2), (1, 1)):
        state = {"step": 0}
        tte.load(state, run, step=step, fallback=other, no_dist=True)
        assert state["step"] == expected
    shutil.rmtree(run / "step-3")
    tte.load(state, run, step="latest", fallback=other, no_dist=True)
    assert state["step"] == 2
    with pytest.raises(tte.errors.NoCheckpointError, match="it has steps 1, 2"):
        tte.load(state, run, step=7, fallback=other, no_dist=True)
    with pytest.raises(ValueError, match="and no step"):
        tte.load(state, run / "step-1", fallback=other, no_dist=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_stays_of_a_save_that_failed(tmp_path: Path, is_async: bool) -> None:
    (tmp_path / "file").write_text("no directory")
    state = {"w": torch.ones(9)}
    for _ in range(2):
        with pytest.raises(CheckpointFailedError) as caught:
            if is_async:
                tte.async_save(state, tmp_path / "file" / "step").result()
            else:
                tte.save(state, tmp_path / "file" / "step")
    died = weakref.ref(state["w"])
    state.clear()
    del caught
    gc.collect()
    assert died() is None


def test_a_lost_directory_is_made_again(tmp_path: Path) -> None:
    state = {"w": torch.ones(9)}
    tte.save(state, tmp_path / "run" / "step-1")
    shutil.rmtree(tmp_path / "run")
    assert tte.save(state, tmp_path / "run" / "step-2", on_error="warn").error == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only directories")
def test_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.warns(UserWarning, match="nothing was saved"):
        assert "Permission denied" in tte.save({"w": torch.ones(9)}, tmp_path / "run" / "a", on_error="warn").error


@pytest.mark.parametrize(
    "wrong",
    [{"on_error": "ignore"}, {"retries": -1}, {"retries": 1.5}, {"max_failures": 0}],
)
def test_arguments_that_make_no_sense(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongValueError, match=next(iter(wrong))):
        tte.save({"w": torch.ones(9)}, tmp_path / "step", **wrong)
    assert not (tmp_path / "step").exists()
