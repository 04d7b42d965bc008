"""Quantisation with a scale per block: its arithmetic, and the blocks of a box of a tensor that is read from files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import add, sub
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.storage.native.fills import BlockPart

NOT_FINITE = "has elements that are NaN or infinite, which fp8 with scales cannot hold"
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Arithmetic(NamedTuple):
    """How a tensor is quantised.

    Attributes:
        dtype: What it becomes.
        held: The dtype of its elements before.
        scaling: As in ``transforms.quantize``.
    """

    dtype: str
    held: str
    scaling: str

    @property
    def rounded(self) -> torch.dtype:
        """What elements are before they are scaled."""
        return torch.float32 if self.held == "float64" else getattr(torch, self.held)

    @property
    def divides(self) -> bool:
        """Whether elements are divided by their factors, instead of multiplied."""
        return self.scaling == "torchao"

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of each block, and its scale, from the largest absolute values of its elements (float32)."""
        most = torch.finfo(getattr(torch, self.dtype)).max
        # A tensor: where it is a number, torch on a GPU multiplies by its inverse, which may give another last bit.
        divisor = amax.new_full((), most, dtype=self.rounded if self.divides else None)
        if self.scaling == "deepseek":
            amax = amax.clamp(min=1e-4)
            return most / amax, amax / divisor
        if self.divides:
            scales = (amax.to(self.rounded) / divisor).to(torch.float32)
            return torch.where(scales > 0, scales, 1.0), scales
        factors = torch.where(amax > 0, most / amax, 1.0)
        return factors, 1.0 / factors


def arithmetic_of(one: _core.MappedTensor) -> Arithmetic:
    """How values, or scales, are made that a transform makes by ``quantize``."""
    return Arithmetic(one.fp8, one.dtypes[-2], one.scaling)


def why_not_quantized(one: _core.MappedTensor) -> str | None:
    """Why values cannot be quantised as a transform says."""
    if any(value != 0 for value, _ in one.values.find_fills((0,) * len(one.values.shape), one.values.shape)):
        return "is padded before it is quantised, which can be with zeros alone"
    passed = one.dtypes[:-1]
    if len(passed) > 2 or any(name not in _DTYPES for name in passed):
        return f"is quantised from {' and '.join(passed)}, expected one of {', '.join(_DTYPES)}, cast once at most"
    return None


class BlockScales:
    """The blocks of a box of a tensor that is quantised, or of its scales.

    Args:
        fqn: Its name, for errors.
        one: What the transform makes.
        begin: Where the box begins.
    """

    def __init__(self, fqn: str, one: _core.MappedTensor, begin: Sequence[int]) -> None:
        assert one.block is not None, "it is not quantised, please report"
        self._fqn, self._one, self._begin = fqn, one, tuple(begin)
        self._shape, self._block, self._arithmetic = one.values.shape, one.block, arithmetic_of(one)
        # In units of the box: of scales a block is one element.
        self._unit = (1,) * len(one.block) if one.is_scales else one.block

    def parts(self, sizes: Sequence[int], max_elements: int) -> Iterator[BlockPart]:
        """The box, in parts whose blocks have at most so many elements if they are not one block."""
        if 0 in sizes:
            return
        first = [at // unit for at, unit in zip(self._begin, self._unit, strict=True)]
        ends = map(add, self._begin, sizes)
        grid = [(end + unit - 1) // unit - at for end, unit, at in zip(ends, self._unit, first, strict=True)]
        for at, counts in _core.BoxParts(first, grid, max(1, max_elements // prod(self._block))):
            read = [(begin * of, min((begin + count) * of, size)) for begin, count, of, size in zip(
                at, counts, self._block, self._shape, strict=True)]  # fmt: skip
            made = [
                (max(begin * unit, low), min((begin + count) * unit, low + size))
                for begin, count, unit, low, size in zip(at, counts, self._unit, self._begin, sizes, strict=True)
            ]
            yield BlockPart(
                tuple(low - begin for (low, _), begin in zip(made, self._begin, strict=True)),
                tuple(high - low for low, high in made),
                tuple(low - begin for (low, _), begin in zip(read, self._begin, strict=True)),
                tuple(high - low for low, high in read),
            )

    def made_of(self, part: BlockPart, elements: Tensor) -> Tensor:
        """The part, from the elements of its blocks, on the CPU.

        Raises:
            CheckpointReadError: Elements are NaN or infinite.
        """
        grid = self._one.grid(elements.shape)
        amax = torch.zeros(prod(grid), dtype=torch.float32, device="cpu")
        steps = [(dim, 1) for dim in range(elements.dim())]
        place = ops.BlockPart(0, self._block, row_major_strides(grid), (0,) * elements.dim(), steps)
        rounded = self._arithmetic.rounded
        ops.block_amax_([elements], [place], amax, rounded=rounded)
        if not amax.isfinite().all():
            raise CheckpointReadError(self._fqn, NOT_FINITE)
        factors, scales = self._arithmetic.scales(amax)
        if self._one.is_scales:
            return scales.view(grid)
        values = torch.empty(elements.shape, dtype=getattr(torch, self._arithmetic.dtype), device="cpu")
        ops.quantize_blocks_([elements], [place], factors, [values], rounded=rounded, divides=self._arithmetic.divides)
        return local_view(values, tuple(map(sub, part.inside, part.read_inside)), part.sizes)
