"""Shows where two tensors differ: counts of different elements in at most 64 x 64 cells, whatever their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_MAX_CELLS = 64


@dataclass
class DifferenceMap:
    """Counts of different elements in cells of the two largest dims, summed over all other dims.

    Attributes:
        shape: The shape of both tensors.
        dims: The dims that give rows and columns of cells: one for a vector, none for a single number.
        sizes: The sizes of these two dims; 1 for a dim that does not exist.
        cell_sizes: Rows and columns of elements in a cell; the last cell of a row or column may have fewer.
        counts: The number of different elements in each cell, by row and column.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...] = field(init=False)
    sizes: tuple[int, int] = field(init=False)
    cell_sizes: tuple[int, int] = field(init=False)
    counts: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        largest = sorted(range(len(self.shape)), key=lambda dim: (-self.shape[dim], dim))[:2]
        self.dims = tuple(sorted(largest))
        rows, cols = (*(self.shape[dim] for dim in self.dims), 1, 1)[:2]
        self.sizes = rows, cols
        self.cell_sizes = -(-rows // _MAX_CELLS), -(-cols // _MAX_CELLS)
        num_cells = [-(-size // cell) for size, cell in zip(self.sizes, self.cell_sizes, strict=True)]
        self.counts = torch.zeros(num_cells, dtype=torch.int64, device="cpu")

    def add(self, offsets: Sequence[int], sizes: Sequence[int], positions: torch.Tensor) -> None:
        """Counts the different elements of a box of the tensor.

        Args:
            offsets, sizes: The box: a number per dim of the tensor.
            positions: The different elements, int64, counted in the row-major order of the box.
        """
        cells = [torch.zeros_like(positions), torch.zeros_like(positions)]
        for dim in reversed(range(len(self.shape))):
            if dim in self.dims:
                axis = self.dims.index(dim)
                cells[axis] = (positions % sizes[dim] + offsets[dim]) // self.cell_sizes[axis]
            positions = positions // sizes[dim]
        flat = cells[0] * self.counts.shape[1] + cells[1]
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)
