"""Collectives over a whole device mesh, one mesh axis after the other, so that no process group has to be made.

All are collective over the mesh: every rank of it calls them in the same order, and no other rank does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def all_gather_values(mesh: DeviceMesh, value: T) -> list[T]:
    """The picklable value of every rank, in row-major order of the mesh."""
    gathered = [value]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        parts: list[list[T]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(parts, gathered, group=group)
        gathered = [member for position in _group_positions(mesh, axis) for member in parts[position]]
    return gathered


def all_gather_bytes(mesh: DeviceMesh, flat: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The flat uint8 tensors of all ranks along some axes, one after another in row-major order of these axes.

    Args:
        flat: 1-D uint8, contiguous, of the same length on every rank, on the mesh's device.
        axes: Mesh axes in increasing order.

    Returns:
        2-D uint8: one row per rank along the axes.
    """
    num_bytes = flat.numel()
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        parts = flat.new_empty(mesh.size(axis), flat.numel())
        dist.all_gather(list(parts.unbind()), flat, group=group)
        positions = _group_positions(mesh, axis)
        flat = (parts if positions == sorted(positions) else parts[positions]).view(-1)
    return flat.view(-1, num_bytes)


def broadcast_bytes(mesh: DeviceMesh, flat: torch.Tensor, src: int) -> None:
    """Fills ``flat`` on every rank from the rank whose coordinate is ``src`` on every axis, in place.

    Args:
        flat: 1-D uint8, contiguous, of the same length on every rank, on the mesh's device.
    """
    for axis in range(mesh.ndim):
        dist.broadcast(flat, src=ranks_along(mesh, axis)[src], group=mesh.get_group(axis))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as 1-D uint8, a view; of any dtype, 0-d included."""
    return tensor.view(-1).view(torch.uint8)


def ranks_along(mesh: DeviceMesh, axis: int) -> list[int]:
    """Global ranks on the line of the mesh through this rank along ``axis``, by coordinate."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "called on a rank outside the mesh, please report"
    line = mesh.mesh[tuple(slice(None) if other == axis else coordinate[other] for other in range(mesh.ndim))]
    return [int(rank) for rank in line.tolist()]


def _group_positions(mesh: DeviceMesh, axis: int) -> list[int]:
    """Per coordinate along ``axis`` the rank within the axis's group: groups sort their ranks, meshes need not."""
    members = dist.get_process_group_ranks(mesh.get_group(axis))
    return [members.index(rank) for rank in ranks_along(mesh, axis)]
