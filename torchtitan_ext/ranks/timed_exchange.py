"""Bytes between the ranks of a group and its first one, the coordinator, by collectives that a ``Watch`` waits for.

Each has a short first message with the lengths, in which most values have room. What is longer goes in a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from torchtitan_ext.ranks.exchange import device_of
from torchtitan_ext.ranks.side_group import SideGroup
from torchtitan_ext.ranks.watch import Watch

_FIRST_BYTES = 1024
_LENGTH_BYTES = 8

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
