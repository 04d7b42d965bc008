"""Which ranks hold which rows and columns of a tensor, as a grid. Pure, and without torch.

A tensor is drawn by two of its dims: those that are cut into most parts. Every begin and end of a box cuts the grid:

    boxes of ranks 0 to 3: rows 0:2 and 4:6 of rank 0, 2:4 of rank 1, all columns; ...
    row_cuts (0, 2, 4, 6), ranks of the cells of the first column: (0,), (1,), (0,)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""


@dataclass(frozen=True)
class Holder:
    """What one rank, or one file, holds of a tensor: one or several boxes."""

    rank: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Rectangle:
    """A box in the plane that is drawn, half-open, and who holds it."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The plane, cut where any rectangle begins or ends.

    Attributes:
        row_cuts: Where rows of cells begin, and where the last ends; like ``col_cuts``.
        ranks: Of each cell, by row and column; several where replicas hold it.
        elided_row: The row of cells that stands for many in the middle; like ``elided_col``.
    """

    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    elided_row: int | None = None
    elided_col: int | None = None


def drawn_dims(shape: Sequence[int], holders: Sequence[Holder]) -> tuple[int, ...]:
    """The dims that make rows and columns: one of a vector, none of a single number."""
    begins: list[set[int]] = [set() for _ in shape]
    for holder in holders:
        for offsets, _ in holder.boxes:
            for dim, offset in enumerate(offsets):
                begins[dim].add(offset)
    most_cut = sorted(range(len(shape)), key=lambda dim: (-len(begins[dim]), dim))
    return tuple(sorted(most_cut[:2]))


def rectangles(shape: Sequence[int], holders: Sequence[Holder]) -> list[Rectangle]:
    """The boxes in the plane of ``drawn_dims``; what lies behind others of another dim is left out."""
    dims = drawn_dims(shape, holders)
    ranks_of: dict[tuple[tuple[int, int], tuple[int, int]], set[int]] = {}
    for holder in holders:
        for offsets, sizes in holder.boxes:
            if 0 in sizes or any(offset for dim, offset in enumerate(offsets) if dim not in dims):
                continue
            spans = [(offsets[dim], offsets[dim] + sizes[dim]) for dim in dims] + [(0, 1), (0, 1)]
            ranks_of.setdefault((spans[0], spans[1]), set()).add(holder.rank)
    return [Rectangle(rows, cols, tuple(sorted(ranks))) for (rows, cols), ranks in sorted(ranks_of.items())]


def is_cut_behind(shape: Sequence[int], holders: Sequence[Holder]) -> bool:
    """Whether a dim that is not drawn is cut as well, so that a picture shows the first of several layers."""
    dims = drawn_dims(shape, holders)
    return any(
        offset
        for holder in holders
        for offsets, _ in holder.boxes
        for dim, offset in enumerate(offsets)
        if dim not in dims
    )


def cut_grid(parts: Sequence[Rectangle], *, max_rows: int, max_cols: int) -> Grid:
    """The grid of some rectangles; of many rows or columns of cells the first and the last, and one for all between."""
    row_cuts, elided_row = _elided({cut for part in parts for cut in part.rows}, max_rows)
    col_cuts, elided_col = _elided({cut for part in parts for cut in part.cols}, max_cols)
    cells: list[list[set[int]]] = [[set() for _ in col_cuts[1:]] for _ in row_cuts[1:]]
    for part in parts:
        for row in _bands(row_cuts, part.rows):
            for col in _bands(col_cuts, part.cols):
                cells[row][col].update(part.ranks)
    ranks = tuple(tuple(tuple(sorted(cell)) for cell in row) for row in cells)
    return Grid(row_cuts, col_cuts, ranks, elided_row, elided_col)


def text_of_ranks(ranks: Sequence[int]) -> str:
    """``3``, ``0-15``, ``0-504 by 8``, ``0, 3, 5-7``; of many pieces the first three."""
    if not ranks:
        return ""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 1 and len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]} by {step}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(words) if len(words) <= 3 else f"{', '.join(words[:3])}, ... {len(ranks)} in all"


def _elided(cuts: Iterable[int], max_bands: int) -> tuple[tuple[int, ...], int | None]:
    """At most so many bands, and which of them stands for those that were left out."""
    ordered = tuple(sorted(cuts))
    if len(ordered) - 1 <= max_bands:
        return ordered, None
    num_first = max_bands // 2
    num_last = max_bands - num_first - 1
    return (*ordered[: num_first + 1], *ordered[len(ordered) - 1 - num_last :]), num_first


def _bands(cuts: Sequence[int], span: tuple[int, int]) -> range:
    """The bands between cuts that a span touches."""
    first = bisect_left(cuts, span[0])
    return range(first if cuts[first] == span[0] else first - 1, bisect_left(cuts, span[1]))
