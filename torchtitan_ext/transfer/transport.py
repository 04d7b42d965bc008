"""How boxes of tensors travel from rank to rank: what stands below the plan of a transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import _core, ops
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
    for box in exchange_table(table, tensors).boxes:
        yield Box(box.peer, part_of(tensors[box.tensor], box), dtype_of(box, tensors))


def exchange_table(table: Tensor, tensors: Sequence[Tensor]) -> _core.ExchangeTable:
    """A table of boxes of these tensors."""
    return _core.ExchangeTable(table.numpy(), [tensor.shape for tensor in tensors])


def dtype_of(box: _core.ExchangeBox, tensors: Sequence[Tensor]) -> torch.dtype:
    """That of the elements of a box on their way."""
    return tensors[box.tensor].dtype if box.dtype < 0 else ops.numbered_dtype(box.dtype)


def part_of(tensor: Tensor, box: _core.ExchangeBox) -> Tensor:
    """A view of a box of a tensor."""
    return local_view(tensor, box.offsets, box.sizes)


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
