"""How boxes of tensors travel from rank to rank: what stands below the plan of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import local_view


class Transport(Protocol):
    """Moves the boxes of one run. Each rank has one of its own, of the same kind."""

    def exchange(
        self,
        sources: list[Tensor],
        targets: list[Tensor],
        sends: Tensor,
        receives: Tensor,
        *,
        number: int,
        timeout_seconds: float,
    ) -> None:
        """Sends all boxes and receives all boxes. Collective: all ranks have agreed on this run before.

        What it raises on one rank, all ranks raise as a TransferFailedError: at once those that have come out of their
        exchange, others when they do. It raises where a rank does not answer in time, and returns when the targets are
        filled, and the sources may be changed. A run calls it once; one that sends changes three times.

        Args:
            sources: Plain tensors of this rank, of any strides and dtypes, to be read.
            targets: The same, to be written where boxes say so. None shares memory with another one or with a source.
            sends: The boxes to be sent, which ``boxes_of(sends, sources)`` gives.
            receives: The boxes to be received. The boxes from one rank have the shapes of those that it sends to this
                one, in the same order; those from and to this rank itself are copied.
            number: Of this memory, the same on all ranks. Under one number, other than 0, the tensors of each call have
                the same memory on every rank, and the boxes are the same, as long as the plan is kept: they may be
                registered when it is first seen. Under 0 they are of this call alone: what a rank sends of changes, and
                all of a run in which some rank reads or fills copies, such as those of wrapper subclasses.
            timeout_seconds: How long a rank may keep others waiting.
        """


class Box(NamedTuple):
    """A part of a tensor that travels, as its elements in row-major order.

    Attributes:
        peer: The other rank, by its position in the group.
        part: A view of the tensor.
        sent_as: The dtype to which the sender converts the elements; of a box to be received, that of the tensor.
    """

    peer: int
    part: Tensor
    sent_as: torch.dtype

    def packed(self) -> Tensor:
        """The bytes that travel: 1-D uint8, the part's own memory where it lies there so."""
        return self.part.to(self.sent_as).contiguous().view(-1).view(torch.uint8)

    def unpack(self, data: Tensor) -> None:
        """Puts bytes that came, as ``packed`` gave them, into the part."""
        self.part.copy_(data.view(self.sent_as).view(self.part.shape))


def boxes_of(table: Tensor, tensors: Sequence[Tensor]) -> Iterator[Box]:
    """The boxes of a table, by peer, in the order in which each pair of ranks counts them."""
    for row in rows_of(table):
        yield Box(row.peer, part_of(tensors[row.tensor], row), dtype_of(row, tensors))


class Row(NamedTuple):
    """A box in a table.

    Attributes:
        peer: The other rank, by its position in the group.
        tensor: Which of the rank's tensors.
        cast_to: The number of the dtype to which the sender converts, or -1.
        offsets, sizes: The box, in the rank's tensor.
    """

    peer: int
    tensor: int
    cast_to: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rows_of(table: Tensor) -> Iterator[Row]:
    """The rows of a table of boxes."""
    entries = table.tolist()
    place = 0
    while place < len(entries):
        num_dims = entries[place + 3]
        first, last = place + 4 + num_dims, place + 4 + 2 * num_dims
        peer, tensor, cast_to = entries[place : place + 3]
        yield Row(peer, tensor, cast_to, tuple(entries[place + 4 : first]), tuple(entries[first:last]))
        place = last


def dtype_of(row: Row, tensors: Sequence[Tensor]) -> torch.dtype:
    """That of the elements of a box on their way."""
    return tensors[row.tensor].dtype if row.cast_to < 0 else ops.numbered_dtype(row.cast_to)


def part_of(tensor: Tensor, row: Row) -> Tensor:
    """A view of the box of a row."""
    return local_view(tensor, row.offsets, row.sizes)


def table_of(rows: Iterable[Row]) -> Tensor:
    """The table with these rows."""
    entries: list[int] = []
    for row in rows:
        entries += (row.peer, row.tensor, row.cast_to, len(row.sizes), *row.offsets, *row.sizes)
    return torch.tensor(entries, dtype=torch.int64, device="cpu")


def flat_table(rows: Sequence[Row | Box], sizes: Sequence[int]) -> Tensor:
    """A table in which each peer gets, or sends, one range of a flat tensor: the consecutive parts of its rows."""
    ends = list(accumulate(sizes, initial=0))
    peers = [row.peer for row in rows]
    starts = [at for at, peer in enumerate(peers) if at == 0 or peers[at - 1] != peer]
    ranges = [(first, last) for first, last in pairwise([*starts, len(rows)]) if ends[last] > ends[first]]
    return table_of(Row(peers[a], 0, -1, (ends[a],), (ends[b] - ends[a],)) for a, b in ranges)


@dataclass(frozen=True)
class GroupTransport:
    """The point-to-point messages of a process group, by ``ops.exchange_runs_``; what has a number is planned once."""

    group: dist.ProcessGroup | None
    bucket_bytes: int
    _planned: dict[int, ops.PlannedExchange] = field(default_factory=dict)

    def exchange(
        self,
        sources: list[Tensor],
        targets: list[Tensor],
        sends: Tensor,
        receives: Tensor,
        *,
        number: int,
        timeout_seconds: float,
    ) -> None:
        planned = self._planned.get(number)
        if planned is None:
            planned = ops.PlannedExchange(
                sources,
                targets,
                sends,
                receives,
                group_name="" if self.group is None else self.group.group_name,
                bucket_bytes=self.bucket_bytes,
            )
            if number:
                self._planned[number] = planned
        planned.run(digest=number, timeout_seconds=timeout_seconds)
