"""Tensors that are quantised on their way from rank to rank: fp8 travels, in units that all ranks have agreed on.

    block_amax_ on each rank, over what it sends --> the largest of all ranks --> a scale for each block
        --> quantize_blocks_ on the ranks that send; the scales' own tensors are filled by the ranks that hold them

A block may lie on several ranks, each of which sees a part of it. The numbers of many tensors are exchanged at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.transfer.endpoint import Endpoint
from torchtitan_ext.transfer.mapped.quantized_keys import QuantizedKey
from torchtitan_ext.transfer.side import Side
from torchtitan_ext.transforms.block_scales import NOT_FINITE, Arithmetic

_MOST_BLOCKS = 1 << 22
"""Whose numbers are exchanged at once, if they are not of one tensor: 16 MiB."""


class Quantizer:
    """One rank's part in the quantised tensors of a plan.

    Args:
        keys: Of all ranks, the same on each.
        told: Which boxes of scales this rank holds, for ``_core.expand_absent``.
        sends: Has the parts that this rank quantises.
    """

    def __init__(self, keys: Sequence[QuantizedKey], told: bytes, sends: Side, target: Endpoint) -> None:
        self._keys = sorted(keys, key=lambda key: (key.arithmetic, key.number))
        self._sends = sends
        self._boxes: dict[str, list[tuple[int, _core.AbsentBox]]] = {}
        for one in _core.expand_absent(told) if told else ():
            first = target.first_tensor[one.position]
            self._boxes[target.names[first]] = [(first + box.chunk, box) for box in one.boxes]
        self._scales: list[tuple[int, _core.AbsentBox, Tensor]] = []

    def quantize(self, phases: Phases, operation: str, device: torch.device) -> None:
        """Fills the parts that this rank sends, and keeps the scales that it holds. Collective.

        Raises:
            StateRefusedError: Elements are NaN or infinite; names the keys, the same on every rank.
        """
        self._scales = []
        wrong: list[str] = []
        for arithmetic, keys, starts in self._batches():
            amax = torch.zeros(sum(prod(key.grid) for key in keys), dtype=torch.float32, device=device)
            parts = list(self._parts(keys, starts))
            find = partial(_find_amax, parts, amax, arithmetic)
            phases.on_all("quantize", find, doing="ranks looked for the largest elements")
            phases.largest("quantize", amax, doing="ranks agreed on the largest elements")
            not_finite = ~amax.isfinite()
            if not_finite.any():
                wrong += [key.values for key in keys if not_finite[starts[key.number] :][: prod(key.grid)].any()]
                continue
            fill = partial(self._fill, keys, starts, parts, arithmetic, amax)
            phases.on_all("quantize", fill, doing="ranks quantised what they send")
        if wrong:
            raise refusal(operation, [Problem("unsupported_tensor", fqn, NOT_FINITE) for fqn in sorted(wrong)])

    def fill_scales(self, filled: Sequence[Tensor]) -> None:
        """Puts the kept scales into the tensors of the target."""
        with torch.no_grad():
            for tensor, box, scales in self._scales:
                local_view(filled[tensor], box.local_offsets, box.sizes).copy_(scales)
        self._scales = []

    def _batches(self) -> Iterator[tuple[Arithmetic, list[QuantizedKey], dict[int, int]]]:
        """Keys that are quantised alike, and by their numbers where the grid of each begins."""
        for arithmetic, alike in groupby(self._keys, key=lambda key: key.arithmetic):
            batch: list[QuantizedKey] = []
            starts: dict[int, int] = {}
            end = 0
            for key in alike:
                if batch and end + prod(key.grid) > _MOST_BLOCKS:
                    yield arithmetic, batch, starts
                    batch, starts, end = [], {}, 0
                batch.append(key)
                starts[key.number] = end
                end += prod(key.grid)
            yield arithmetic, batch, starts

    def _parts(self, keys: Sequence[QuantizedKey], starts: Mapping[int, int]) -> Iterator[_Part]:
        """What of these keys this rank quantises; what several ranks want alike once."""
        for key in keys:
            strides = row_major_strides(key.grid)
            for held, (first, _, steps), sent in self._sends.quantized.get(key.number, ()):
                yield _Part(held, ops.BlockPart(starts[key.number], key.block, strides, first, steps), sent)

    def _fill(
        self,
        keys: Sequence[QuantizedKey],
        starts: Mapping[int, int],
        parts: Sequence[_Part],
        arithmetic: Arithmetic,
        amax: Tensor,
    ) -> None:
        """Makes what is sent of these keys, and keeps what this rank holds of their scales."""
        factors, scales = arithmetic.scales(amax)
        held, places, sent = [one.held for one in parts], [one.place for one in parts], [one.sent for one in parts]
        with torch.no_grad():
            ops.quantize_blocks_(held, places, factors, sent, rounded=arithmetic.rounded, divides=arithmetic.divides)
        for key in keys:
            for tensor, box in self._boxes.get(key.scales, ()):
                grid = scales[starts[key.number] :][: prod(key.grid)].view(key.grid)
                self._scales.append((tensor, box, local_view(grid, box.offsets, box.sizes).clone()))


class _Part(NamedTuple):
    """A part of a tensor on the rank that sends it: what it holds, which part that is, and what is sent."""

    held: Tensor
    place: ops.BlockPart
    sent: Tensor


def _find_amax(parts: Sequence[_Part], amax: Tensor, arithmetic: Arithmetic) -> None:
    with torch.no_grad():
        held, places = [part.held for part in parts], [part.place for part in parts]
        ops.block_amax_(held, places, amax, rounded=arithmetic.rounded)
