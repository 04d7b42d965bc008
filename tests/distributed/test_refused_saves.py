"""Disks that refuse a save: read-only, full or lost on some ranks or all, as the kernel says it; training goes on."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mounts import lost, mount_disk, namespace, own_mounts, read_only, why_forbidden
from states import save_of_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError
from torchtitan_ext.storage.commit import commit
from torchtitan_ext.storage.commit.steps import folders_in_fallback

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 10_000
DISK_BYTES = 16 << 20

# What storage does, on which ranks, and what the kernel calls it. A directory that is lost on all ranks is made again.
CASES = {
    1: [("read_only", (0,)), ("full", (0,))],
    2: [("read_only", (0,)), ("read_only", (1,)), ("lost", (0,)), ("lost", (1,)), ("full", (0, 1))],
    4: [("read_only", (0,)), ("read_only", (2,)), ("read_only", (0, 1, 2, 3)), ("lost", (3,)), ("full", (0, 1, 2, 3))],
}
ERRORS = {
    "read_only": "Read-only file system",
    "lost": "does not see what the coordinator wrote",
    "full": "No space left on device",
}


@pytest.fixture(autouse=True)
def mounts_are_allowed() -> None:
    if why_forbidden():
        pytest.skip(why_forbidden())


@contextlib.contextmanager
def shared_disk(disk: Path) -> Iterator[None]:
    """A small disk that only the ranks see, each by mounts of its own. Collective."""
    names = [""]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            disk.mkdir()
            stack.enter_context(own_mounts())
            mount_disk(disk, str(DISK_BYTES))
            names = [namespace()]
        dist.broadcast_object_list(names)
        if dist.get_rank() != 0:
            stack.enter_context(own_mounts(like=names[0]))
        dist.barrier()
        yield
        dist.barrier()


@contextlib.contextmanager
def refusing(kind: str, ranks: tuple[int, ...], disk: Path) -> Iterator[None]:
    """Collective."""
    filler = disk / "filler"
    with contextlib.ExitStack() as stack:
        if kind == "full" and dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(DISK_BYTES))
        elif kind != "full" and dist.get_rank() in ranks:
            stack.enter_context(read_only(disk) if kind == "read_only" else lost(disk))
        dist.barrier()
        yield
        dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink(missing_ok=True)
    dist.barrier()


def save(step: int, run: Path, *, is_async: bool, **options: Any) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": tte.full.distribute_tensor(torch.full((ROWS, 4), float(step)), mesh, [Shard(0)]), "step": step}
    path = run / f"step-{step}"
    saved = save_of_run(state, path, is_async=is_async, **options)
    result = saved.result() if is_async else saved
    return result.path, result.error


def steps_in(run: Path) -> list[int]:
    """The steps, each of which is whole; and nothing else is left."""
    found = []
    for path in run.iterdir():
        state = {"w": torch.zeros(ROWS, 4), "step": -1}
        tte.load(state, path, no_dist=True)
        assert bool((state["w"] == state["step"]).all()) and path.name == f"step-{state['step']}"
        found.append(int(state["step"]))
    return sorted(found)


def meet_all_cases(rank: int, world_size: int, folder: Path) -> list[tuple[str, Any, list[int], list[int]]]:
    """Of each case what happened to the saves, and the steps of the run and of the other directory after it."""
    disk, other = folder / "disk", folder / "other"
    run, seen, step = disk / "run", [], 0
    of_run = Path(folders_in_fallback(run, other)[0])
    warnings.simplefilter("ignore")
    with shared_disk(disk), pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_SHOWN_SECONDS", 0.1)
        for kind, ranks in CASES[world_size]:
            first, said = step + 1, []
            said.append(save(first, run, is_async=False, keep=2))
            with refusing(kind, ranks, disk):
                said.append(save(first + 1, run, is_async=True, on_error="warn", retries=1))
                said.append(save(first + 2, run, is_async=False, on_error="warn"))
                try:
                    save(first + 3, run, is_async=False)
                except CheckpointFailedError as error:
                    said.append(("raised", str(error)))
                said.append(save(first + 4, run, is_async=True, fallback=other))
            step = first + 5
            said.append(save(step, run, is_async=False, keep=2))
            dist.barrier()
            steps = (steps_in(run), steps_in(of_run)) if rank == 0 else ([], [])
            dist.barrier()
            seen.append((kind, said, *steps))
    return seen


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_storage_that_refuses(run_world, tmp_path: Path, world_size: int) -> None:
    seen = run_world(world_size, meet_all_cases, tmp_path)
    run = tmp_path / "disk" / "run"
    other = Path(folders_in_fallback(run, tmp_path / "other")[0])
    in_other: list[int] = []
    for number, (kind, said, steps, steps_of_other) in enumerate(seen[0]):
        assert all(of_rank[number][:2] == (kind, said) for of_rank in seen)
        first = 6 * number + 1
        assert said[0] == (str(run / f"step-{first}"), "") and said[-1] == (str(run / f"step-{first + 5}"), "")
        for count, (path, error) in enumerate(said[1:3], 1):
            assert path == "" and f"nothing was saved ({count} in a row" in error and ERRORS[kind] in error
        assert said[3][0] == "raised" and ERRORS[kind] in said[3][1]
        in_other.append(first + 4)
        assert said[4] == (str(other / f"step-{first + 4}"), "")
        assert steps == [first, first + 5] and steps_of_other == in_other
    assert len(seen[0]) == len(CASES[world_size])


def train(folder: Path | None) -> list[float]:
    """The example's job; in a folder with a save each second step: of the third and fifth on the disk is full."""
    sys.path.append(str(EXAMPLES))
    from llama_job import LlamaJob

    disk = Path() if folder is None else folder / "disk"
    with contextlib.nullcontext() if folder is None else shared_disk(disk):
        job = LlamaJob({"dp": 2, "tp": 2}, seed=0)
        losses = []
        for step in range(1, 7):
            losses += job.train(last_step=step)
            if folder is not None:
                case = ("full", (0, 1, 2, 3)) if step in (3, 4) else ("read_only", (1,) if step == 5 else ())
                with refusing(*case, disk):
                    result = save_of_run(job.state(), disk / f"step-{step}", keep=1, on_error="warn", max_failures=9)
                assert bool(result.error) == (step in (3, 4, 5))
        if folder is not None:
            assert tte.latest(disk) == disk / "step-6"
    return losses


def train_both_ways(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    return train(folder), train(None)


@pytest.mark.filterwarnings("ignore:save. nothing was saved")
def test_the_example_goes_on_training(run_world, tmp_path: Path) -> None:
    for with_saves, without in run_world(4, train_both_ways, tmp_path):
        assert with_saves == without
        assert len(without) == 6
