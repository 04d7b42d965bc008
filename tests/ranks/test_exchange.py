"""Collectives of values and bytes over groups and meshes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_ext.ranks.exchange import (
    Opening,
    all_gather_bytes,
    broadcast_bytes,
    broadcast_value,
    check_usable,
    gather_values,
    ranks_along,
    scope_ranks,
)

OPENING = Opening("save", "phase plan of save")


def gathered(rank: int, world_size: int) -> list[Any]:
    short, long = f"rank {rank}", "x" * (rank * 5000)
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    pair = dist.new_group([1, 2])
    by_mesh = gather_values(short, mesh, opening=OPENING)
    assert by_mesh == [f"rank {other}" for other in scope_ranks(mesh)]
    assert [len(value) for value in gather_values(long, opening=OPENING)] == [
        other * 5000 for other in range(world_size)
    ]
    assert pair == dist.GroupMember.NON_GROUP_MEMBER or gather_values(short, pair, opening=OPENING) == [
        "rank 1",
        "rank 2",
    ]
    # Of equal ranks some may name the mesh and others not.
    line = init_device_mesh("cpu", (world_size,))
    return gather_values(rank, line if rank % 2 else None, opening=OPENING)


def test_values_of_all_ranks_in_order(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(4, gathered) == [[0, 1, 2, 3]] * 4


def broadcast(rank: int, world_size: int) -> list[Any]:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    flats = [torch.full((3,), rank, dtype=torch.uint8) for _ in range(3)]
    broadcast_bytes(flats[0], mesh, src=1)
    broadcast_bytes(flats[1], src=3)
    if rank in ranks_along(mesh, 0):
        broadcast_bytes(flats[2], mesh.get_group(0), src=1)
    broadcast_bytes(torch.empty(0, dtype=torch.uint8), mesh)
    return [*(int(flat[2]) for flat in flats), broadcast_value({"rank": rank}, src=2)]


def test_one_rank_is_the_source(run_world: Callable[..., list[Any]]) -> None:
    # Columns of the mesh are the groups {0, 3} and {1, 2}; the second rank of each is 3 and 2.
    columns = [3, 2, 2, 3]
    assert run_world(4, broadcast) == [[2, 3, column, {"rank": 2}] for column in columns]


def gathered_bytes(rank: int, world_size: int) -> list[Any]:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    flat = torch.tensor([rank, 10 * rank], dtype=torch.uint8)
    return [all_gather_bytes(mesh, flat, axes).tolist() for axes in ([0, 1], [1], [])]


def test_bytes_in_the_order_of_the_mesh(run_world: Callable[..., list[Any]]) -> None:
    answers = run_world(4, gathered_bytes)
    rows = {0: [0, 2], 1: [3, 1], 2: [0, 2], 3: [3, 1]}
    for rank, (both, row, none) in enumerate(answers):
        assert both == [[3, 30], [1, 10], [0, 0], [2, 20]]
        assert row == [[other, 10 * other] for other in rows[rank]]
        assert none == [[rank, 10 * rank]]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert gather_values("alone", opening=OPENING) == ["alone"] and broadcast_value(3) == 3 and scope_ranks() == [0]
    flat = torch.ones(2, dtype=torch.uint8)
    broadcast_bytes(flat)
    assert flat.tolist() == [1, 1]


def destroyed(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    for scope in (None, group, mesh, dist.group.WORLD):
        check_usable("save", scope)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="^save: the process group of group was destroyed; make a new one$"):
        check_usable("save", group)


def test_a_destroyed_group_is_one_sentence(run_world: Callable[..., list[Any]]) -> None:
    run_world(2, destroyed)
