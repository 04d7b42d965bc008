"""The self-test that users run where their GPUs are. No other test runs it."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_ext import selftest


def points_of_a_world(rank: int, world_size: int) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {name: selftest._failed(check, mesh, name) for name, check in selftest.POINTS.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_points_hold(run_world: Callable[..., list[Any]], world_size: int) -> None:
    assert run_world(world_size, points_of_a_world) == [dict.fromkeys(selftest.POINTS, False)] * world_size


def point_that_fails_on_one_rank(rank: int, world_size: int) -> bool:
    def check(mesh: object) -> None:
        if rank == 1:
            raise ValueError("other bits")

    return selftest._failed(check, init_device_mesh("cpu", (world_size,)), "a point")


def test_a_point_that_fails_on_one_rank_has_failed_on_all(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(2, point_that_fails_on_one_rank) == [True, True]
