"""Collectives of values and bytes: over a process group, or over a whole device mesh, one mesh axis after the other so
that no process group has to be made.

All are collective: every rank of the group or mesh calls them in the same order, and no other rank does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Scope = DeviceMesh | dist.ProcessGroup | None
"""The ranks that take part: those of a mesh, of a group, or of the default group."""

_FIRST_BYTES = 1024
_LENGTH_BYTES = 8


def scope_ranks(scope: Scope = None) -> list[int]:
    """Global ranks of a scope, in the order of ``gather_values``; without any process group rank 0 alone."""
    if isinstance(scope, DeviceMesh):
        return [int(rank) for rank in scope.mesh.flatten().tolist()]
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(dist.group.WORLD if scope is None else scope)


def check_usable(operation: str, scope: Scope) -> None:
    """Raises ``ValueError`` where a process group of a scope was destroyed. Not collective."""
    if scope is None:
        return
    try:
        groups = scope.get_all_groups() if isinstance(scope, DeviceMesh) else [scope]
        for group in groups:
            dist.get_process_group_ranks(group)
    except Exception:
        what = "the mesh" if isinstance(scope, DeviceMesh) else "group"
        raise ValueError(f"{operation}: the process group of {what} was destroyed; make a new one") from None


def gather_values(value: T, scope: Scope = None) -> list[T]:
    """The picklable value of every rank: of a group in its order, of a mesh in row-major order; without any process
    group that of this process.

    ``dist.all_gather_object`` sends all lengths before the first value. Most values here are short: they travel in the
    message of the lengths, which takes half the time, and what of others does not fit in a second one.
    """
    gathered = [value]
    if isinstance(scope, DeviceMesh):
        for axis in reversed(range(scope.ndim)):
            parts = _gather_lists(gathered, scope.get_group(axis))
            gathered = [member for position in _group_positions(scope, axis) for member in parts[position]]
        return gathered
    if scope is None and not (dist.is_available() and dist.is_initialized()):
        return gathered
    group = dist.group.WORLD if scope is None else scope
    assert group is not None
    # In a list, as along the axis of a mesh: ranks of which only some name the mesh understand each other.
    return [member for part in _gather_lists(gathered, group) for member in part]


def _gather_lists(values: list[T], group: dist.ProcessGroup) -> list[list[T]]:
    data = pickle.dumps(values)
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    first = _gather_blocks(data[:_FIRST_BYTES], _FIRST_BYTES, group)
    lengths = [_LENGTH_BYTES + int.from_bytes(block[:_LENGTH_BYTES], "little") for block in first]
    if max(lengths) > _FIRST_BYTES:
        rest = _gather_blocks(data[_FIRST_BYTES:], max(lengths) - _FIRST_BYTES, group)
        first = [begin + end for begin, end in zip(first, rest, strict=True)]
    return [pickle.loads(block[_LENGTH_BYTES:]) for block in first]


def _gather_blocks(data: bytes, num_bytes: int, group: dist.ProcessGroup) -> list[bytes]:
    """The bytes of every rank, each filled up with zeros to one length."""
    device = device_of(group)
    block = torch.frombuffer(bytearray(data.ljust(num_bytes, b"\0")), dtype=torch.uint8).to(device)
    return [row.tobytes() for row in all_gather_bytes(group, block).cpu().numpy()]


def broadcast_value(value: T, src: int = 0) -> T:
    """The picklable value of one global rank, on every rank of the default group; without one that of this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    box = [value if dist.get_rank() == src else None]
    dist.broadcast_object_list(box, src=src)
    return box[0]  # type: ignore[return-value]


def all_gather_bytes(scope: Scope, flat: torch.Tensor, axes: Sequence[int] = ()) -> torch.Tensor:
    """The flat uint8 tensors of all ranks of a group, or of a mesh along some axes in row-major order of these.

    Args:
        flat: 1-D uint8, contiguous, of the same length on every rank, on a device from which the scope can send.
        axes: Of a mesh: its axes in increasing order.

    Returns:
        2-D uint8: one row per rank.
    """
    num_bytes = flat.numel()
    if not isinstance(scope, DeviceMesh):
        if scope is None and not dist.is_initialized():
            return flat.view(1, num_bytes)
        rows = flat.new_empty(dist.get_world_size(scope), num_bytes)
        dist.all_gather(list(rows.unbind()), flat, group=scope)
        return rows
    mesh = scope
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        parts = flat.new_empty(mesh.size(axis), flat.numel())
        dist.all_gather(list(parts.unbind()), flat, group=group)
        positions = _group_positions(mesh, axis)
        flat = (parts if positions == sorted(positions) else parts[positions]).view(-1)
    return flat.view(-1, num_bytes)


def broadcast_bytes(flat: torch.Tensor, scope: Scope = None, *, src: int = 0) -> None:
    """Fills ``flat`` on every rank from one, in place.

    Args:
        flat: 1-D uint8, contiguous, of the same length on every rank, on a device from which the scope can send.
        src: Of a mesh: the source's coordinate on every axis. Of a group: its rank in it.
    """
    if flat.numel() == 0:
        return
    if isinstance(scope, DeviceMesh):
        for axis in range(scope.ndim):
            dist.broadcast(flat, src=ranks_along(scope, axis)[src], group=scope.get_group(axis))
    elif scope is not None or dist.is_initialized():
        dist.broadcast(flat, src=scope_ranks(scope)[src], group=scope)


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


def has_backend(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a group can send tensors of a kind of device."""
    return torch.device(device_type) in group._device_types


def device_of(group: dist.ProcessGroup, preferred: str = "cpu") -> torch.device:
    """A device from which a group can send: of the preferred kind if it can, and the one that the group is bound to."""
    has_preferred = has_backend(group, preferred)
    device_type = preferred if has_preferred else next(device.type for device in group._device_types)
    if device_type == "cpu":
        return torch.device("cpu")
    bound = getattr(group, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
