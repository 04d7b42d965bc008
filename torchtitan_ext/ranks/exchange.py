"""Collectives of values and bytes: over a process group, or over a device mesh, one mesh axis after the other.

No process group has to be made for a mesh. All functions are collective: every rank of the group or mesh calls them in
the same order, and no other rank does.

``TimedExchange`` passes bytes between the ranks of a group and its first rank, the coordinator, by collectives that a
``Watch`` waits for. Each sends a short first message with the lengths, in which most values have room, and a second one
where the value is longer.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from torchtitan_ext.ranks.side_group import SideGroup
from torchtitan_ext.ranks.watch import Watch

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


# A collective of a rank that was given up ends by itself a little later. Until then the process cannot end.
_MORE_SECONDS = 10

Options = TypeVar("Options", AllgatherOptions, BroadcastOptions, GatherOptions, ScatterOptions)


class TimedExchange:
    """The collectives of one operation. All methods are collective, and raise ``LostRankError`` as ``Watch`` does.

    Args:
        side: What stands beside the group, to be used in its place.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch, side: SideGroup | None = None) -> None:
        # Backends have the collectives of groups, which their stubs leave out.
        self._group: Any = group if side is None else side.backend
        self._watch = watch
        self._size = dist.get_world_size(group)
        self._is_coordinator = dist.get_rank(group) == 0
        self._device = device_of(group) if side is None else torch.device("cpu")

    def heads(self, data: bytes) -> list[bytes]:
        """The first message of every rank: with it all have come. Its rest is for one of the next two."""
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES]
        return [bytes(row) for row in self._all_gather(head, _FIRST_BYTES)]

    def rest_on_all(self, data: bytes, heads: Sequence[bytes]) -> list[memoryview]:
        """The data of every rank, on every rank."""
        lengths = [_length(head) for head in heads]
        return _cut(heads, lengths) or self._all_gather(data, max(lengths), lengths)

    def rest_on_coordinator(self, data: bytes, heads: Sequence[bytes]) -> list[memoryview]:
        """The data of every rank, on the coordinator; nothing elsewhere."""
        lengths = [_length(head) for head in heads]
        whole = _cut(heads, lengths)
        if whole is not None:
            return whole if self._is_coordinator else []
        block = self._block(data, max(lengths))
        rows = block.new_empty(self._size if self._is_coordinator else 0, len(block))
        options = self._timed(GatherOptions())
        options.rootRank = 0
        gathered = [list(rows.unbind())] if self._is_coordinator else []
        self._watch.wait_for(lambda: self._group.gather(gathered, [block], options), block, rows)
        return _views(rows, lengths) if self._is_coordinator else []

    def scatter(self, parts: Sequence[bytes]) -> memoryview:
        """Of each rank its part; only the coordinator has any."""
        longest = max(map(len, parts), default=0)
        heads = [_lengths_of(len(part), longest) + part[: _FIRST_BYTES - 2 * _LENGTH_BYTES] for part in parts]
        head = self._scatter(heads, _FIRST_BYTES)
        longest = _length(head[_LENGTH_BYTES:])
        if longest <= _FIRST_BYTES - 2 * _LENGTH_BYTES:
            return head[2 * _LENGTH_BYTES :][: _length(head)]
        return self._scatter(parts, longest)[: _length(head)]

    def broadcast(self, data: bytes) -> memoryview:
        """The coordinator's data, on every rank."""
        head = self._broadcast(len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES])
        length = _length(head)
        if length <= _FIRST_BYTES - _LENGTH_BYTES:
            return head[_LENGTH_BYTES:][:length]
        return self._broadcast(data, length)

    def _all_gather(self, data: bytes, num_bytes: int, lengths: Sequence[int] | None = None) -> list[memoryview]:
        block = self._block(data, num_bytes)
        rows = block.new_empty(self._size, num_bytes)
        options = self._timed(AllgatherOptions())
        gathered = [list(rows.unbind())]
        self._watch.wait_for(lambda: self._group.allgather(gathered, [block], options), block, rows)
        return _views(rows, lengths or [num_bytes] * self._size)

    def _scatter(self, parts: Sequence[bytes], num_bytes: int) -> memoryview:
        blocks = [self._block(part, num_bytes) for part in parts]
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        options = self._timed(ScatterOptions())
        options.rootRank = 0
        sent = [blocks] if blocks else []
        self._watch.wait_for(lambda: self._group.scatter([received], sent, options), received, *blocks)
        return received.cpu().numpy().data

    def _broadcast(self, data: bytes, num_bytes: int = _FIRST_BYTES) -> memoryview:
        block = self._block(data if self._is_coordinator else b"", num_bytes)
        options = self._timed(BroadcastOptions())
        options.rootRank = 0
        self._watch.wait_for(lambda: self._group.broadcast([block], options), block)
        return block.cpu().numpy().data

    def _block(self, data: bytes, num_bytes: int) -> torch.Tensor:
        """1-D uint8 of ``num_bytes`` on the group's device, filled from its begin."""
        block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        block.numpy()[: len(data)] = memoryview(data)
        block.numpy()[len(data) :] = 0
        return block.to(self._device)

    def _timed(self, options: Options) -> Options:
        """NCCL ends the process when the time of a collective is over: there the group's own time stays."""
        options.asyncOp = True
        if self._device.type == "cpu":
            options.timeout = timedelta(seconds=max(self._watch.seconds_left, 0) + _MORE_SECONDS)
        return options


def _length(head: bytes | memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _lengths_of(*lengths: int) -> bytes:
    return b"".join(length.to_bytes(_LENGTH_BYTES, "little") for length in lengths)


def _cut(heads: Sequence[bytes], lengths: Sequence[int]) -> list[memoryview] | None:
    """The data of all ranks, where all of it was in the first message."""
    if max(lengths) > _FIRST_BYTES - _LENGTH_BYTES:
        return None
    return [memoryview(head)[_LENGTH_BYTES:][:length] for head, length in zip(heads, lengths, strict=True)]


def _views(rows: torch.Tensor, lengths: Sequence[int]) -> list[memoryview]:
    return [memoryview(row)[:length] for row, length in zip(rows.cpu().numpy(), lengths, strict=True)]
