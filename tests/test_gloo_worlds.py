import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_worlds import WorldHungError, WorldPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def total(rank: int, world_size: int, start: int) -> int:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return int(value.item())


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def has_process_group(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def gather_2d(rank: int, world_size: int, mesh_shape: tuple[int, int]) -> list[int]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    return distribute_tensor(torch.arange(7), mesh, [Shard(0), Shard(0)]).full_tensor().tolist()


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise CheckpointException("save", {1: (ValueError("the reason"), None)})
    dist.barrier()


def hang(rank: int, world_size: int) -> None:
    if rank == 0:
        threading.Event().wait()


def test_results_come_back_by_rank_from_the_same_processes(run_world) -> None:
    pids = run_world(4, process_id)
    assert len(set(pids)) == 4
    assert run_world(4, total, 10) == [46] * 4
    assert run_world(2, process_id) == pids[:2]


def test_a_world_without_process_group(run_world) -> None:
    assert run_world(1, has_process_group, process_group=False) == [False]
    assert run_world(1, has_process_group) == [True]


def test_meshes_of_one_world_do_not_leak_into_the_next(run_world) -> None:
    for mesh_shape in [(2, 2), (4, 1), (2, 2), (1, 4), (2, 2)]:
        assert run_world(4, gather_2d, mesh_shape) == [list(range(7))] * 4


def test_a_failing_rank_is_named_and_the_world_goes_on(run_world) -> None:
    with pytest.raises(CheckpointException, match="the reason") as caught:
        run_world(3, fail_on_rank_1)
    assert "rank 1 failed" in str(caught.value.__cause__)
    assert "fail_on_rank_1" in str(caught.value.__cause__)
    assert run_world(3, total, 0) == [3] * 3


def break_the_next_set_up(rank: int, world_size: int) -> None:
    dist.init_process_group = refuse


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("no interface")


def test_a_world_that_cannot_be_set_up_gets_new_workers() -> None:
    pool = WorldPool()
    try:
        pool.run(2, break_the_next_set_up)
        with pytest.warns(UserWarning, match="set up again with new workers: rank [01]: no interface"):
            assert pool.run(2, total, 0) == [1, 1]
    finally:
        pool.close()


def test_a_hanging_world_is_killed_and_replaced() -> None:
    pool = WorldPool()
    try:
        with pytest.raises(WorldHungError, match=r"ranks \[0, 1\] of 2"):
            pool.run(2, hang, timeout_seconds=1)
        assert pool.run(2, total, 0) == [1, 1]
    finally:
        pool.close()
