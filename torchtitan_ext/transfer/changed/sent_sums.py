"""Proof of boxes that a cast or a map changes, so that fingerprints differ: they hold the sums of what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.transfer.transport import Box, Transport, boxes_of, flat_table


def different_boxes(
    sources: list[Tensor],
    targets: list[Tensor],
    sends: Tensor,
    receives: Tensor,
    changed: tuple[Sequence[int], Sequence[int]],
    device: torch.device,
    transport: Transport,
    timeout_seconds: float,
) -> list[int]:
    """Which of this rank's received boxes hold other elements than were sent, after casts. Collective.

    Args:
        sources, targets, sends, receives: What was exchanged, as for ``Transport.exchange``.
        changed: The numbers of the boxes that are compared, of those sent and of those received.
        device: On which the tensors lie.
    """
    out, received = (
        _some(table, tensors, which)
        for table, tensors, which in (
            (sends, sources, changed[0]),
            (receives, targets, changed[1]),
        )
    )
    told, own = _sums(out, device), _sums(received, device)
    expected = torch.empty_like(own)
    transport.exchange(
        [told],
        [expected],
        flat_table(out, [1] * len(out)),
        flat_table(received, [1] * len(received)),
        number=0,
        timeout_seconds=timeout_seconds,
    )
    return [changed[1][at] for at in (expected != own).nonzero().flatten().tolist()]


def _some(table: Tensor, tensors: list[Tensor], numbers: Sequence[int]) -> list[Box]:
    wanted = set(numbers)
    return [box for number, box in enumerate(boxes_of(table, tensors)) if number in wanted]


def _sums(boxes: Sequence[Box], device: torch.device) -> Tensor:
    """Of each box, as it travels."""
    with torch.no_grad():
        sums = [sum_box(box.part.to(box.sent_as), (0,) * box.part.dim(), tuple(box.part.shape)) for box in boxes]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)
