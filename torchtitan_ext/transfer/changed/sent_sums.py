"""Proof of boxes that a cast or a map changes, so that fingerprints differ: they hold the sums of what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan_ext import _core
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.transfer.transport import GroupTransport, dtype_of, exchange_table, part_of


def different_boxes(
    sources: list[Tensor],
    targets: list[Tensor],
    sends: Tensor,
    receives: Tensor,
    changed: tuple[Sequence[int], Sequence[int]],
    device: torch.device,
    transport: GroupTransport,
    timeout_seconds: float,
) -> list[int]:
    """Which of the targets have a box that holds other elements than were sent, after casts. Collective.

    Args:
        sources, targets, sends, receives: What was exchanged, as for ``GroupTransport.exchange``.
        changed: The numbers of the boxes that are compared, of those sent and of those received.
        device: On which the tensors lie.
    """
    out, received = exchange_table(sends, sources), exchange_table(receives, targets)
    told, own = _sums(out, sources, changed[0], device), _sums(received, targets, changed[1], device)
    expected = torch.empty_like(own)
    transport.exchange(
        [told],
        [expected],
        _one_number_each(out, changed[0]),
        _one_number_each(received, changed[1]),
        number=0,
        timeout_seconds=timeout_seconds,
    )
    boxes = received.boxes
    return [boxes[changed[1][at]].tensor for at in (expected != own).nonzero().flatten().tolist()]


def _one_number_each(table: _core.ExchangeTable, numbers: Sequence[int]) -> Tensor:
    """The table of an exchange of a number for each of some boxes."""
    sizes = np.zeros(len(table), dtype=np.int64)
    sizes[numbers] = 1
    return torch.from_numpy(table.flat_entries(sizes))


def _sums(
    table: _core.ExchangeTable, tensors: Sequence[Tensor], numbers: Sequence[int], device: torch.device
) -> Tensor:
    """Of each of some boxes, as it travels."""
    boxes, sums = table.boxes, []
    with torch.no_grad():
        for box in map(boxes.__getitem__, numbers):
            part = part_of(tensors[box.tensor], box).to(dtype_of(box, tensors))
            sums.append(sum_box(part, (0,) * part.dim(), tuple(part.shape)))
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)
