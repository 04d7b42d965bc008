"""Blocks of a tensor, each with one scale: their largest elements, and fp8 elements in units of their scales.

The tensor itself may lie anywhere, in parts: a ``BlockPart`` says which of its elements a local tensor has. The *grid*
of a tensor has one number per block, in row-major order; the grids of several tensors lie one behind the other in a
flat one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_ext.op_library import call, listed, register_in_place


class BlockPart(NamedTuple):
    """Which elements of a tensor in blocks a local tensor has.

    Attributes:
        start: Where the tensor's grid begins in the flat one.
        block: Sizes of the blocks, one per dim of the tensor.
        grid_strides: Per dim how far the next block is in the grid.
        first: The place of the local tensor's first element.
        steps: Per dim of the local tensor the dim of the tensor through which it steps, and by how many elements.
    """

    start: int
    block: Sequence[int]
    grid_strides: Sequence[int]
    first: Sequence[int]
    steps: Sequence[tuple[int, int]]


def _tables(parts: Sequence[BlockPart]) -> list[int]:
    tables: list[int] = []
    for start, block, grid_strides, first, steps in parts:
        tables += (len(block), start, *block, *grid_strides, *first)
        for step in steps:
            tables += step
    return tables


def block_amax_(
    tensors: Sequence[Tensor], parts: Sequence[BlockPart], amax: Tensor, *, rounded: torch.dtype = torch.float32
) -> None:
    """Raises the numbers of blocks to the largest absolute values of their elements; a NaN counts as infinite.

    Args:
        tensors: float32, float64, bfloat16 or float16, any strides, on one device.
        parts: What each of them is.
        amax: Changed. 1-d float32 there, of at least 0: the flat grid.
        rounded: The dtype to which elements are rounded first; float32 leaves them.

    Raises:
        ValueError: A part does not fit its tensor or the grid, or a dtype is another one.
    """
    given = listed("block_amax_", "tensors", tensors)
    if given:
        call("block_amax_", (given, _tables(parts), rounded, amax))


register_in_place("block_amax_", 3)


def quantize_blocks_(
    tensors: Sequence[Tensor],
    parts: Sequence[BlockPart],
    factors: Tensor,
    out: Sequence[Tensor],
    *,
    rounded: torch.dtype = torch.float32,
    divides: bool = False,
) -> None:
    """Fills fp8 tensors with elements times the factors of their blocks, in float32, clamped to what fp8 has.

    Args:
        tensors, parts, rounded: As for ``block_amax_``.
        factors: 1-d float32, the flat grid.
        out: Filled. float8_e4m3fn or float8_e5m2, contiguous, of the sizes of ``tensors``.
        divides: By the factors, instead of a multiplication.

    Raises:
        ValueError: As ``block_amax_``.
    """
    given, filled = listed("quantize_blocks_", "tensors", tensors), listed("quantize_blocks_", "out", out)
    if given or filled:
        call("quantize_blocks_", (given, _tables(parts), rounded, factors, divides, filled))


register_in_place("quantize_blocks_", 5)
