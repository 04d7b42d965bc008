"""Proof of boxes that a cast or a map changes, so that fingerprints differ: they hold the sums of what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.state.value_digest import sum_box


def different_boxes(
    sources: list[Tensor],
    targets: list[Tensor],
    sends: Tensor,
    receives: Tensor,
    changed: tuple[Sequence[int], Sequence[int]],
    device: torch.device,
    group_name: str,
    bucket_bytes: int,
    timeout_seconds: float,
) -> list[int]:
    """Which of the targets have a box that holds other elements than were sent, after casts. Collective.

    Args:
        sources, targets, sends, receives: What was exchanged, as for ``ops.exchange_runs_``.
        changed: The numbers of the boxes that are compared, of those sent and of those received.
        device: On which the tensors lie.
    """
    out, received = list(_boxes(sends)), list(_boxes(receives))
    told, own = _sums(out, sources, changed[0], device), _sums(received, targets, changed[1], device)
    expected = torch.empty_like(own)
    tables = _one_number_each(out, changed[0]), _one_number_each(received, changed[1])
    planned = ops.PlannedExchange([told], [expected], *tables, group_name=group_name, bucket_bytes=bucket_bytes)
    planned.run(digest=0, timeout_seconds=timeout_seconds)
    return [received[changed[1][at]].tensor for at in (expected != own).nonzero().flatten().tolist()]


class _Box(NamedTuple):
    """A box of a table; see ``ops.exchange_runs_``."""

    peer: int
    tensor: int
    dtype: int
    offsets: Sequence[int]
    sizes: Sequence[int]


def _boxes(table: Tensor) -> Iterator[_Box]:
    numbers, at = table.tolist(), 0
    while at < len(numbers):
        peer, tensor, dtype, num_dims = numbers[at : at + 4]
        begin, middle, at = at + 4, at + 4 + num_dims, at + 4 + 2 * num_dims
        yield _Box(peer, tensor, dtype, numbers[begin:middle], numbers[middle:at])


def _one_number_each(boxes: Sequence[_Box], numbers: Sequence[int]) -> Tensor:
    """The table of an exchange of a number for each of some boxes."""
    entries: list[int] = []
    begin = 0
    for peer, count in Counter(boxes[number].peer for number in numbers).items():
        entries += [peer, 0, -1, 1, begin, count]
        begin += count
    return torch.tensor(entries, dtype=torch.int64, device="cpu")


def _sums(boxes: Sequence[_Box], tensors: Sequence[Tensor], numbers: Sequence[int], device: torch.device) -> Tensor:
    """Of each of some boxes, as it travels."""
    sums = []
    with torch.no_grad():
        for box in map(boxes.__getitem__, numbers):
            part = local_view(tensors[box.tensor], box.offsets, box.sizes)
            sent = part if box.dtype < 0 else part.to(ops.numbered_dtype(box.dtype))
            sums.append(sum_box(sent, (0,) * sent.dim(), tuple(sent.shape)))
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)
