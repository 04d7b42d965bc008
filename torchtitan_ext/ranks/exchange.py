"""Collectives of values and bytes: over a process group, or over a device mesh, one mesh axis after the other.

A mesh needs no process group of its own. All functions are collective: every rank of the group or mesh calls them in
the same order, and no other rank does. ``TimedExchange`` passes bytes between the ranks of a group and its first rank,
the coordinator; a ``Watch`` waits for its collectives.

Each exchange sends a first message of 1 KiB: the length of the data and as much of the data as has room. Most values
fit. If the data of any rank does not, a second message carries all data.

The first message of every exchange over all ranks is an all-gather of these sizes, and says which call sends it
(``Opening``). So ranks that make different calls at once find that out together, before anything else is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
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

from torchtitan_ext.errors import DifferentCallsError, Problem, WrongArgumentError, refusal
from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.ranks.side_group import SideGroup
from torchtitan_ext.ranks.watch import Watch, outlast

T = TypeVar("T")
Scope = DeviceMesh | dist.ProcessGroup | None
"""The ranks that take part: those of a mesh, of a group, or of the default group."""

_FIRST_BYTES = 1024
_LENGTH_BYTES = 8
# Of an opening, which tells its length in one byte before it.
_MOST_OPENING_BYTES = 255


@dataclass(frozen=True)
class Opening:
    """What a rank is about to do, which the first message of an exchange says.

    Attributes:
        call: The call as messages name it, such as ``"save"`` or ``"load(prove=True)"``.
        step: Where in the call. Ranks with equal steps understand each other, whatever their calls are named.
    """

    call: str
    step: str

    def encoded(self) -> bytes:
        text = f"{self.step}\n{self.call}".encode(errors="backslashreplace")[:_MOST_OPENING_BYTES]
        return bytes([len(text)]) + text


REFUSED = "refused"
"""The step of a rank that has refused its own arguments. Its data is the text of the error."""


def scope_ranks(scope: Scope = None) -> list[int]:
    """Global ranks of a scope, in the order of ``gather_values``; without any process group rank 0 alone."""
    if isinstance(scope, DeviceMesh):
        return [int(rank) for rank in scope.mesh.flatten().tolist()]
    if scope is None and not (dist.is_available() and dist.is_initialized()):
        return [0]
    group = dist.group.WORLD if scope is None else scope
    assert group is not None
    return dist.get_process_group_ranks(group)


def check_usable(operation: str, scope: Scope) -> None:
    """Raises ``ValueError`` if a process group of the scope was destroyed. Not collective."""
    if scope is None:
        return
    try:
        groups = scope.get_all_groups() if isinstance(scope, DeviceMesh) else [scope]
        for group in groups:
            dist.get_process_group_ranks(group)
    except Exception:
        what = "the mesh" if isinstance(scope, DeviceMesh) else "group"
        raise ValueError(f"{operation}: the process group of {what} was destroyed; make a new one") from None


def gather_values(value: T, scope: Scope = None, *, opening: Opening) -> list[T]:
    """The picklable value of every rank: of a group in its order, of a mesh in row-major order. Without any process
    group: the value of this process.

    Raises ``DifferentCallsError`` or ``WrongArgumentError`` on all ranks of a group of which some make another call.

    Takes half the time of ``dist.all_gather_object``, which sends all lengths before the first value.
    """
    gathered = [value]
    if isinstance(scope, DeviceMesh):
        for axis in reversed(range(scope.ndim)):
            parts = _gather_lists(gathered, scope.get_group(axis), opening)
            gathered = [member for position in _group_positions(scope, axis) for member in parts[position]]
        return gathered
    if scope is None and not (dist.is_available() and dist.is_initialized()):
        return gathered
    group = dist.group.WORLD if scope is None else scope
    assert group is not None
    # In a list, as along the axis of a mesh: ranks of which only some name the mesh understand each other.
    return [member for part in _gather_lists(gathered, group, opening) for member in part]


def _gather_lists(values: list[T], group: dist.ProcessGroup, opening: Opening) -> list[list[T]]:
    device, data = device_of(group), pickle.dumps(values)

    def gather(block: bytes, num_bytes: int) -> list[memoryview]:
        return _views(all_gather_bytes(group, _block(block, num_bytes, device)))

    heads = same_calls(gather(_head_of(data, opening.encoded()), _FIRST_BYTES), dist.get_process_group_ranks(group))
    lengths = list(map(_length, heads))
    # Pickles know where they end.
    return [pickle.loads(part) for part in _cut(heads, lengths) or gather(data, max(lengths))]


def broadcast_value(value: T, src: int = 0) -> T:
    """The picklable value of global rank ``src``, on every rank of the default group; without a group, ``value``."""
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
        finish_collective(dist.all_gather(list(rows.unbind()), flat, group=scope, async_op=True), num_bytes)
        return rows
    mesh = scope
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        parts = flat.new_empty(mesh.size(axis), flat.numel())
        finish_collective(dist.all_gather(list(parts.unbind()), flat, group=group, async_op=True), flat.numel())
        positions = _group_positions(mesh, axis)
        flat = (parts if positions == sorted(positions) else parts[positions]).view(-1)
    return flat.view(-1, num_bytes)


def finish_collective(work: dist.Work | None, num_bytes: int) -> None:
    """Waits for a collective of so many bytes per rank. The memory of large ones is wanted back at once."""
    if work is not None:
        work.wait()
        if num_bytes <= _FIRST_BYTES:
            outlast(work)


def broadcast_bytes(flat: torch.Tensor, scope: Scope = None, *, src: int = 0) -> None:
    """Copies ``flat`` of one rank into ``flat`` of every other rank.

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
        dist.broadcast(flat, group=scope, group_src=src)


def ranks_along(mesh: DeviceMesh, axis: int) -> list[int]:
    """Global ranks that differ from this one in their coordinate on ``axis`` alone, in the order of that coordinate."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "called on a rank outside the mesh, please report"
    line = mesh.mesh[tuple(slice(None) if other == axis else coordinate[other] for other in range(mesh.ndim))]
    return [int(rank) for rank in line.tolist()]


def _group_positions(mesh: DeviceMesh, axis: int) -> list[int]:
    """The rank in the group of ``axis`` at each coordinate: groups sort their ranks, meshes need not."""
    members = dist.get_process_group_ranks(mesh.get_group(axis))
    return [members.index(rank) for rank in ranks_along(mesh, axis)]


def has_backend(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a group can send tensors that lie on this kind of device."""
    return torch.device(device_type) in group._device_types


def device_of(group: dist.ProcessGroup, preferred: str = "cpu") -> torch.device:
    """A device from which a group can send: of the preferred kind if possible; the one that it is bound to, if any."""
    has_preferred = has_backend(group, preferred)
    device_type = preferred if has_preferred else next(device.type for device in group._device_types)
    if device_type == "cpu":
        return torch.device("cpu")
    bound = getattr(group, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


# So much later than the deadline gloo ends a collective that this rank gave up. Until then the process cannot end.
_MORE_SECONDS = 10

Rooted = TypeVar("Rooted", BroadcastOptions, GatherOptions, ScatterOptions)
Options = TypeVar("Options", AllgatherOptions, BroadcastOptions, GatherOptions, ScatterOptions)


class TimedExchange:
    """The collectives of one operation, over a group or the ``side`` group beside it.

    All methods are collective, and raise ``LostRankError`` as ``Watch`` does.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch, side: SideGroup | None = None) -> None:
        # Backends have the collectives of groups, which their stubs leave out.
        self._group: Any = group if side is None else side.backend
        self._watch = watch
        self._ranks = dist.get_process_group_ranks(group)
        self._size = len(self._ranks)
        self._is_coordinator = position_in(group) == 0
        self._device = device_of(group) if side is None else torch.device("cpu")

    def heads(self, data: bytes, opening: Opening) -> list[memoryview]:
        """The first message of every rank. Returns when all ranks have called it; ``rest_on_all`` or
        ``rest_on_coordinator`` with the same data follows.

        Raises:
            DifferentCallsError: Ranks make different calls. The same on every rank; nothing follows.
            WrongArgumentError: Some ranks have refused their arguments. The same on every rank; nothing follows.
        """
        heads = self._all_gather(_head_of(data, opening.encoded()), _FIRST_BYTES)
        try:
            return same_calls(heads, self._ranks)
        except (DifferentCallsError, WrongArgumentError):
            # In a group that is lost, this may be a message of an operation that other ranks have given up.
            self._watch.confirm()
            raise

    def rest_on_all(self, data: bytes, heads: Sequence[memoryview]) -> list[memoryview]:
        """The data of every rank, on every rank."""
        lengths = list(map(_length, heads))
        return _cut(heads, lengths) or self._all_gather(data, max(lengths), lengths)

    def rest_on_coordinator(self, data: bytes, heads: Sequence[memoryview]) -> list[memoryview]:
        """The data of every rank, on the coordinator; nothing elsewhere."""
        lengths = list(map(_length, heads))
        whole = _cut(heads, lengths)
        if whole is not None:
            return whole if self._is_coordinator else []
        block = _block(data, max(lengths), self._device)
        rows = block.new_empty(self._size if self._is_coordinator else 0, len(block))
        options = self._from_first(GatherOptions())
        gathered = [list(rows.unbind())] if self._is_coordinator else []
        self._watch.wait_for(lambda: self._group.gather(gathered, [block], options), block, rows)
        return _views(rows, lengths) if self._is_coordinator else []

    def scatter(self, parts: Sequence[bytes]) -> memoryview:
        """Gives each rank its part. Only the coordinator passes parts."""
        longest = max(map(len, parts), default=0)
        head = self._scatter([_head_of(part, _length_bytes(longest)) for part in parts], _FIRST_BYTES)
        longest = _length(head[_LENGTH_BYTES:])
        if longest <= _FIRST_BYTES - 2 * _LENGTH_BYTES:
            return head[2 * _LENGTH_BYTES :][: _length(head)]
        return self._scatter(parts, longest)[: _length(head)]

    def broadcast(self, data: bytes) -> memoryview:
        """The coordinator's data, on every rank."""
        head = self._broadcast(_head_of(data), _FIRST_BYTES)
        length = _length(head)
        if length <= _FIRST_BYTES - _LENGTH_BYTES:
            return head[_LENGTH_BYTES:][:length]
        return self._broadcast(data, length)

    def _all_gather(self, data: bytes, num_bytes: int, lengths: Sequence[int] | None = None) -> list[memoryview]:
        block = _block(data, num_bytes, self._device)
        rows = block.new_empty(self._size, num_bytes)
        options = self._timed(AllgatherOptions())
        gathered = [list(rows.unbind())]
        self._watch.wait_for(lambda: self._group.allgather(gathered, [block], options), block, rows)
        return _views(rows, lengths)

    def _scatter(self, parts: Sequence[bytes], num_bytes: int) -> memoryview:
        blocks = [_block(part, num_bytes, self._device) for part in parts]
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        options = self._from_first(ScatterOptions())
        sent = [blocks] if blocks else []
        self._watch.wait_for(lambda: self._group.scatter([received], sent, options), received, *blocks)
        return received.cpu().numpy().data

    def _broadcast(self, data: bytes, num_bytes: int) -> memoryview:
        block = _block(data if self._is_coordinator else b"", num_bytes, self._device)
        options = self._from_first(BroadcastOptions())
        self._watch.wait_for(lambda: self._group.broadcast([block], options), block)
        return block.cpu().numpy().data

    def _from_first(self, options: Rooted) -> Rooted:
        options.rootRank = 0
        return self._timed(options)

    def _timed(self, options: Options) -> Options:
        """NCCL ends the process when a collective runs out of time: there the timeout of the group stays."""
        options.asyncOp = True
        if self._device.type == "cpu":
            options.timeout = timedelta(seconds=max(self._watch.seconds_left, 0) + _MORE_SECONDS)
        return options


def _block(data: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The data, filled up with zeros to ``num_bytes``, as 1-D uint8."""
    block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    block.numpy()[: len(data)] = memoryview(data)
    block.numpy()[len(data) :] = 0
    return block.to(device)


def _head_of(data: bytes, more: bytes = b"") -> bytes:
    """The first message: the length of the data, perhaps more, and as much of the data as has room."""
    first = _length_bytes(len(data)) + more
    return first + data[: _FIRST_BYTES - len(first)]


def _length_bytes(length: int) -> bytes:
    return length.to_bytes(_LENGTH_BYTES, "little")


def same_calls(heads: Sequence[memoryview], ranks: Sequence[int]) -> list[memoryview]:
    """The first messages of all ranks without what they say of the call, which is the same.

    Raises:
        DifferentCallsError: The ranks make different calls.
        WrongArgumentError: Some of them have refused their arguments.
    """
    openings, data = [], []
    for head in heads:
        end = _LENGTH_BYTES + 1 + head[_LENGTH_BYTES]
        step, _, call = bytes(head[_LENGTH_BYTES + 1 : end]).decode(errors="replace").partition("\n")
        openings.append(Opening(call, step))
        data.append(head[end:])
    steps = {opening.step for opening in openings}
    if steps == {openings[0].step} and REFUSED not in steps:
        return [memoryview(bytes(head[:_LENGTH_BYTES]) + bytes(rest)) for head, rest in zip(heads, data, strict=True)]
    if REFUSED in steps:
        raise refusal(
            " and ".join(dict.fromkeys(opening.call for opening in openings)),
            [
                Problem("refused_argument", f"rank {rank}", bytes(rest[: _length(head)]).decode(errors="replace"))
                for rank, opening, head, rest in zip(ranks, openings, heads, data, strict=True)
                if opening.step == REFUSED
            ],
        )
    calls = {rank: opening.call for rank, opening in zip(ranks, openings, strict=True)}
    if len(set(calls.values())) == 1:  # of one call, which stands elsewhere
        calls = {rank: opening.step for rank, opening in zip(ranks, openings, strict=True)}
    raise DifferentCallsError(calls)


def _length(head: bytes | memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _cut(heads: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview] | None:
    """The data of all ranks, where all of it was in the first message."""
    if max(lengths) > len(heads[0]) - _LENGTH_BYTES:
        return None
    return [head[_LENGTH_BYTES:][:length] for head, length in zip(heads, lengths, strict=True)]


def _views(rows: torch.Tensor, lengths: Sequence[int] | None = None) -> list[memoryview]:
    lengths = lengths or [rows.shape[1]] * len(rows)
    return [memoryview(row)[:length] for row, length in zip(rows.cpu().numpy(), lengths, strict=True)]
