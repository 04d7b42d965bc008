"""Saves that go on in a thread while training uses the same process group."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.arguments import check_can_send_from_cpu
from torchtitan_ext.errors import CheckpointFailedError
from torchtitan_ext.ranks.side_group import _side_groups, side_group_of


class Waiting(tte.FileWriter):
    """Plans when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go_on, self.has_planned = threading.Event(), threading.Event()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.go_on.wait()
        planned = super().prepare_local_plan(plan)
        self.has_planned.set()
        return planned


def saved_number(path: Path) -> int:
    state = {"w": torch.zeros(3)}
    tte.load(state, path)
    return int(state["w"][2])


def train_beside_a_save(rank: int, world_size: int, folder: Path) -> None:
    # Rank 0 trains first and plans then, rank 1 the other way round.
    writer = Waiting(folder)
    saved = tte.async_save({"w": torch.ones(3)}, folder, storage_writer=writer)
    if rank == 1:
        writer.go_on.set()
        writer.has_planned.wait()
    sums = torch.ones(1)
    work = dist.all_reduce(sums, async_op=True)
    if rank == 0:
        writer.go_on.set()
    assert work is not None
    work.wait()
    for _ in range(100):
        dist.all_reduce(sums)
        sums /= world_size
    assert sums.item() == world_size
    saved.result()
    assert saved_number(folder) == 1


def refuse(*args: Any) -> None:
    raise OSError("too many open files")


def wait_in_vain(*args: Any) -> None:
    """What gloo does on the ranks that can connect, after its time."""
    raise RuntimeError("wait timeout")


def in_all_circumstances(rank: int, world_size: int, folder: Path) -> None:
    # Ranks need not be in equally many groups.
    dist.new_group([0])
    train_beside_a_save(rank, world_size, folder / "beside")
    world = dist.group.WORLD
    assert world is not None
    side = side_group_of(world)
    tte.async_save({"w": torch.full((3,), 2.0)}, folder / "kept").result()
    assert side is not None and side_group_of(world) is side

    group = dist.new_group([0, 1])
    with mock.patch.object(dist, "ProcessGroupGloo", refuse if rank == 1 else wait_in_vain):
        with pytest.raises(CheckpointFailedError, match="rank 1: .*too many open files.* or use tte.save"):
            tte.async_save({"w": torch.ones(3)}, folder / "failed", process_group=group)
    assert side_group_of(group) is None
    tte.async_save({"w": torch.full((3,), 3.0)}, folder / "group", process_group=group).result()
    if rank == 1:  # lost on one rank, made anew on both
        del _side_groups[group]
    tte.async_save({"w": torch.full((3,), 4.0)}, folder / "anew", process_group=group).result()
    names = [None] * world_size
    dist.all_gather_object(names, side_group_of(group).name)
    assert names[0] == names[1]

    with mock.patch.object(dist, "is_gloo_available", return_value=False):
        tte.async_save({"w": torch.full((3,), 5.0)}, folder / "over the group").result()
        with pytest.raises(ValueError, match="got a group for cuda, expected one that can send from CPU memory"):
            check_can_send_from_cpu("async_save", SimpleNamespace(_device_types=[torch.device("cuda")]))
    names = ["beside", "kept", "group", "anew", "over the group"]
    assert [saved_number(folder / name) for name in names] == [1, 2, 3, 4, 5]

    # Tests before this one, in the same processes, may have left groups that something still holds.
    ours = [weakref.ref(world), weakref.ref(group)]
    assert all(made() in _side_groups for made in ours)
    del group, world
    for thread in threading.enumerate():  # Some may still let go of their last save.
        if thread.name.startswith("torchtitan_ext"):
            thread.join()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [made() for made in ours] == [None, None]
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    train_beside_a_save(rank, world_size, folder / "again")


def test_on_the_group_of_training(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, in_all_circumstances, tmp_path)


def test_one_rank_has_nothing_beside(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(1, one_rank, tmp_path)


def one_rank(rank: int, world_size: int, path: Path) -> None:
    tte.async_save({"w": torch.ones(3)}, path).result()
    assert side_group_of(dist.group.WORLD) is None
    assert saved_number(path) == 1
