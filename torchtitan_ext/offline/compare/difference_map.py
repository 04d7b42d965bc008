"""Where two tensors differ, as counts of cells: a map of at most 64 x 64 of them, whatever the size of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_MAX_CELLS = 64


@dataclass
class DifferenceMap:
    """Counts of elements that differ, by cells of the two largest dims; of other dims all are counted together.

    Attributes:
        shape: Of the tensors.
        dims: Those that make rows and columns of cells: one of a vector, none of a single number.
        sizes: Elements of these dims; 1 where there is none.
        cell_sizes: Elements of a cell; the last of a row or column may have fewer.
        counts: Elements that differ, by row and column of cells.
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
        """Counts elements of a box.

        Args:
            offsets: Of the box in the tensor, as many as it has dims; like ``sizes``.
            positions: Of the elements that differ, int64, in the row-major order of the box.
        """
        cells = [torch.zeros_like(positions), torch.zeros_like(positions)]
        for dim in reversed(range(len(self.shape))):
            if dim in self.dims:
                axis = self.dims.index(dim)
                cells[axis] = (positions % sizes[dim] + offsets[dim]) // self.cell_sizes[axis]
            positions = positions // sizes[dim]
        flat = cells[0] * self.counts.shape[1] + cells[1]
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)
