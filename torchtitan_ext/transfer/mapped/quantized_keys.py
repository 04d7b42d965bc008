"""What is quantised on its way from rank to rank: plain values, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_ext.transforms.block_scales import Arithmetic


class QuantizedKey(NamedTuple):
    """A tensor that is quantised, and what it becomes.

    Attributes:
        number: That of the key in the target's world.
        values, scales: Keys of the target, the second one with a number for each block.
        grid: How many blocks the tensor has along each dim: the shape of the scales.
        block: Sizes of the blocks.
    """

    number: int
    values: str
    scales: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arithmetic: Arithmetic
