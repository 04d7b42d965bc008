"""Saves that storage refuses on a rank or all: the same outcome on every rank, never half a step, training goes on."""

import gc
import os
import re
import resource
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from states import save_of_run, step_of_run
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    AbsentRunError,
    CheckpointFailedError,
    NoCheckpointError,
    ReplicaMismatchError,
    WrongValueError,
)
from torchtitan_ext.storage.commit.steps import folders_in_fallback

# Saves of this size meet the limit, the index and the metadata of a save do not.
ROWS = 40_000
LIMIT_BYTES = 100_000


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((ROWS, 4), float(step))
    return {"w": tte.full.distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


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


def save(kind: str, *arguments: Any, **options: Any) -> Any:
    saved = save_of_run(*arguments, is_async=kind == "async", **options)
    return saved.result() if kind == "async" else saved


def train(rank: int, world_size: int, folder: Path, kind: str, full_ranks: tuple[int, ...]) -> list[Any]:
    """Seven saves, of which those from the second to the fifth meet a full disk."""
    run = folder / "run"
    seen: list[Any] = []
    for step in range(1, 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with Full(full_ranks if 2 <= step <= 5 else ()):
                    state = state_of(step)
                    result = save(kind, state, run / f"step-{step}", on_error="warn", retries=1)
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
    [(1, "save", (0,)), (2, "save", (1,)), (2, "async", (0, 1)), (4, "save", (0, 2))],
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
    tte.load({"step": 0}, run, step="latest", no_dist=True, planner=tte.LoadPlanner())


def save_with_fallback(rank: int, world_size: int, folder: Path, kind: str) -> list[Any]:
    run, other = folder / "run", folder / "other"
    seen: list[Any] = []
    if rank == 0:
        (folder / "file").write_text("no directory")
    dist.barrier()
    for step, path in ((1, run), (2, folder / "file"), (3, run)):
        options = {"on_error": "raise", "fallback": other, "keep": 2}
        result = save(kind, state_of(step), path / f"step-{step}", **options)
        seen.append(result.path)
    with pytest.raises(CheckpointFailedError, match="rank 1: TimeoutError: the planner of a user"):
        options = {"planner": UsersPlanner("finish_plan" if rank == 1 else ""), "on_error": "warn", "fallback": other}
        save(kind, state_of(9), run / "step-9", **options)
    with pytest.raises(CheckpointFailedError) as caught:
        save(kind, state_of(4), folder / "file" / "step-4", fallback=folder / "file" / "more")
    seen.append(str(caught.value))
    with pytest.raises(ReplicaMismatchError):  # the state is at fault: no other place is tried
        save(kind, {"x": rank}, run / "step-5", on_error="warn", fallback=other, retries=3)
    return seen


@pytest.mark.parametrize("kind", ["save", "async"])
def test_another_directory_takes_what_the_first_refuses(run_world, tmp_path: Path, kind: str) -> None:
    seen = run_world(2, save_with_fallback, tmp_path, kind)
    assert seen[0] == seen[1]
    run, other = tmp_path / "run", tmp_path / "other"
    of_file = Path(folders_in_fallback(tmp_path / "file", other)[0])
    assert seen[0][:3] == [str(run / "step-1"), str(of_file / "step-2"), str(run / "step-3")]
    assert "Errno 20] got a file, expected a directory; move it" in seen[0][3]
    assert loaded_steps(run) == [1, 3] and loaded_steps(of_file) == [2]
    assert loaded_step(run, "latest", other) == 3  # the step of another run does not count
    of_file.rename(folders_in_fallback(run, other)[0])
    for step, expected in (("latest", 3), ("last-good", 3), (2, 2), (1, 1)):
        assert loaded_step(run, step, other) == expected
    shutil.rmtree(run / "step-3")
    assert loaded_step(run, "latest", other) == 2
    with pytest.raises(NoCheckpointError, match="it has steps 1, 2"):
        step_of_run(run, 7, other)


def loaded_step(run: Path, step: Any, fallback: Path) -> Any:
    state = {"step": 0}
    tte.load(state, step_of_run(run, step, fallback), no_dist=True)
    return state["step"]


def test_runs_that_share_a_fallback_directory(tmp_path: Path) -> None:
    runs, other = [tmp_path / name / "run" for name in "ab"], tmp_path / "other"
    for number, run in enumerate(runs):
        tte.save({"step": 1, "run": number}, run / "step-1")
        run.rename(tmp_path / f"disk-{number}")
        run.write_text("the disk is lost")
    for step in (2, 3, 4):
        for number, run in enumerate(runs):
            path = save_of_run({"step": step, "run": number}, run / f"step-{step}", fallback=other, keep=2).path
            assert path == str(Path(folders_in_fallback(run, other)[0]) / f"step-{step}")
    for number, run in enumerate(runs):
        run.unlink()
        for is_made in (False, True):  # as where the disk is not mounted
            run.mkdir() if is_made else None
            for step in ("latest", "last-good"):
                match = re.escape(f"{run} is not there or is empty, and the fallback ") + ".*pass step=4 to go on from"
                with pytest.raises(AbsentRunError, match=match):
                    step_of_run(run, step, other)
            assert loaded_step(run, 4, other) == 4
        run.rmdir()
        (tmp_path / f"disk-{number}").rename(run)
        state = {"step": 0, "run": -1}
        tte.load(state, step_of_run(run, "latest", other))
        assert state == {"step": 4, "run": number}
        assert loaded_step(run, 1, other) == 1
        with pytest.raises(NoCheckpointError, match="it has steps 1, 3, 4"):
            step_of_run(run, 2, other)
    with pytest.raises(NoCheckpointError, match="has none of this run, it has run-[0-9a-f]{12}, run-"):
        step_of_run(tmp_path / "c", "latest", other)


class UsersPlanner(tte.SavePlanner):
    """A planner of a user, which looks at a server or a file of its own in one of its methods."""

    def __init__(self, method: str, error: type[OSError] = TimeoutError) -> None:
        super().__init__()
        self.method, self.error = method, error

    def fail_in(self, method: str) -> None:
        if method == self.method:
            raise self.error("the planner of a user")

    def create_local_plan(self) -> Any:
        self.fail_in("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self.fail_in("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self.fail_in("resolve_data")
        return super().resolve_data(write_item)


class SlowStorage(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise TimeoutError("the server of the storage")


class NoState:
    def state_dict(self) -> dict[str, Any]:
        raise ConnectionError("the server of the data")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("kind", ["save", "async"])
def test_errors_of_the_caller_are_not_warned_of(tmp_path: Path, kind: str) -> None:
    state, options = {"w": torch.ones(99), "v": torch.ones(9)}, {"on_error": "warn", "fallback": tmp_path / "other"}
    for method in ("create_local_plan", "finish_plan", "resolve_data"):
        for error in (TimeoutError, FileNotFoundError):
            with pytest.raises(CheckpointFailedError, match=f"{error.__name__}: the planner of a user"):
                save(kind, state, tmp_path / "step-1", planner=UsersPlanner(method, error), **options)
    with pytest.raises(CheckpointFailedError, match="ConnectionError: the server of the data"):
        save(kind, {"data": NoState()}, tmp_path / "step-1", **options)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CheckpointFailedError, match="got a file, expected a directory: .*file"):
        save(kind, state, tmp_path / "file", **options)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.warns(UserWarning, match="nothing was saved .*TimeoutError: the server of the storage"):
        save(kind, state, storage_writer=SlowStorage(tmp_path / "step-1"), on_error="warn")


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_stays_of_a_save_that_failed(tmp_path: Path, is_async: bool) -> None:
    (tmp_path / "file").write_text("no directory")
    state = {"w": torch.ones(9)}
    for _ in range(2):
        with pytest.raises(CheckpointFailedError, match="got a file, expected a directory; move it: .*file'") as caught:
            if is_async:
                tte.async_save(state, tmp_path / "file" / "run" / "step").result()
            else:
                tte.save(state, tmp_path / "file" / "step")
        with pytest.raises(CheckpointFailedError, match="got a file, expected a directory; move it: .*file'"):
            tte.weights.save({"w": torch.ones(9)}, tmp_path / "file" / "weights")
    died = weakref.ref(state["w"])
    state.clear()
    del caught
    gc.collect()
    assert died() is None


def test_a_lost_directory_is_made_again(tmp_path: Path) -> None:
    state = {"w": torch.ones(9)}
    tte.save(state, tmp_path / "run" / "step-1")
    shutil.rmtree(tmp_path / "run")
    assert save_of_run(state, tmp_path / "run" / "step-2", on_error="warn").error == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only directories")
def test_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.warns(UserWarning, match="nothing was saved"):
        assert "Permission denied" in save_of_run({"w": torch.ones(9)}, tmp_path / "run" / "a", on_error="warn").error


@pytest.mark.parametrize(
    "wrong",
    [{"on_error": "ignore"}, {"retries": -1}, {"retries": 1.5}, {"max_failures": 0}],
)
def test_arguments_that_make_no_sense(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongValueError, match=next(iter(wrong))):
        tte.CheckpointManager(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()
