"""Ranks that die, disks that fill up and files that are damaged, under tte.save and tte.load."""

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lost_worlds import strike
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, TorchtitanExtError

FAILING_RANK = 1


def sharded(rows: int = 9) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": tte.full.distribute_tensor(torch.arange(rows * 4.0).view(rows, 4), mesh, [Shard(0)]), "step": 7}


def save(state: dict[str, Any], path: Path, is_async: bool, **options: Any) -> None:
    if is_async:
        tte.async_save(state, path, **options).result()
    else:
        tte.save(state, path, **options)


class DyingWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if dist.get_rank() == FAILING_RANK:
            strike("kill")
        return super().write_data(plan, planner)


def lose_a_rank(rank: int, world_size: int, folder: Path, is_async: bool) -> None:
    tte.save(sharded(), folder / "earlier")
    with pytest.raises(LostRankError) as caught:
        save(sharded(), folder / "step", is_async, storage_writer=DyingWriter(folder / "step"))
    (folder / f"error{rank}").write_text(str(caught.value))


def load_whole(rank: int, world_size: int, path: Path) -> bool:
    whole = {"w": torch.zeros(9, 4)}
    tte.load(whole, path)
    return torch.equal(whole["w"], torch.arange(36.0).view(9, 4))


@pytest.mark.nightly("lost")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_is_killed_in_a_save_is_named(
    run_world: Callable[..., Any], tmp_path: Path, is_async: bool
) -> None:
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, lose_a_rank, tmp_path, is_async)
    errors = [(tmp_path / f"error{rank}").read_text() for rank in (0, 2)]
    assert all(f"rank(s) {FAILING_RANK} did not answer" in error for error in errors)
    assert run_world(2, load_whole, tmp_path / "earlier") == [True, True]


def fill_the_disk(rank: int, world_size: int, path: Path, is_async: bool) -> str:
    state = sharded(rows=50_000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == FAILING_RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointFailedError) as caught:
            save(state, path, is_async)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_is_one_error_on_all_ranks(run_world: Callable[..., Any], tmp_path: Path, is_async: bool) -> None:
    texts = run_world(2, fill_the_disk, tmp_path, is_async)
    assert len(set(texts)) == 1 and texts[0].startswith(f"save failed on 1 rank(s): rank {FAILING_RANK}: ")
    assert not (tmp_path / ".metadata").exists()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "cut metadata": lambda path: os.truncate(path / ".metadata", 200),
    "other metadata": lambda path: (path / ".metadata").write_bytes(b"garbage" * 30),
    "no data": lambda path: (path / "__0_0.distcp").unlink(),
    "cut data": lambda path: os.truncate(path / "__0_0.distcp", 500),
    "empty data": lambda path: os.truncate(path / "__0_0.distcp", 0),
    "no value": lambda path: os.truncate(path / "__0_0.distcp", 20),
}


def save_sharded(rank: int, world_size: int, path: Path) -> None:
    tte.save(sharded(), path)


def load_damaged(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(TorchtitanExtError) as caught:
        tte.load(sharded(), path)
    return str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(run_world: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "whole"
    run_world(2, save_sharded, path)
    return path


@pytest.mark.parametrize("name", DAMAGE)
def test_lost_and_cut_files_are_one_error_on_all_ranks(
    run_world: Callable[..., Any], checkpoint: Path, tmp_path: Path, name: str
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    DAMAGE[name](damaged)
    texts = run_world(2, load_damaged, damaged)
    assert texts[0] == texts[1] and texts[0].startswith("load")
