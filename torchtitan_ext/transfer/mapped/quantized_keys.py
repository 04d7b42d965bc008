"""What is quantised on its way from rank to rank: plain values, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_ext.transforms.block_scales import Arithmetic, grid_of


class QuantizedKey(NamedTuple):
    """A tensor that is quantised, and what it becomes.

    Attributes:
        number: That of the key in the target's world.
        values, scales: Keys of the target, the second one with a number for each block.
        shape, block: Of the tensor.
    """

    number: int
    values: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    arithmetic: Arithmetic

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        return grid_of(self.shape, self.block)
