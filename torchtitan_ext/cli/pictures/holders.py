"""Finds which ranks hold which rows and columns of a tensor, as a grid, from the names of files. Imports no torch.

A tensor is drawn by two of its dims: those that are cut into most parts. Every begin and end of a box cuts the grid:

    boxes of ranks 0 to 3: rows 0:2 and 4:6 of rank 0, 2:4 of rank 1, all columns; ...
    row_cuts (0, 2, 4, 6), ranks of the cells of the first column: (0,), (1,), (0,)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchtitan_ext.layout.layout import Box

# No cluster has more ranks: a longer number in a file's name is no rank.
_OF_RANK = re.compile(r"__(\d{1,7})_")


Holders = Mapping[int, Sequence[Box]]
"""The boxes of a tensor that each rank, or file, holds."""


@dataclass(frozen=True)
class Rectangle:
    """A box in the plane that is drawn, half-open, and the ranks that hold it."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plane:
    """What is drawn of a tensor.

    Attributes:
        dims: The dims that give rows and columns: one for a vector, none for a single number.
        parts: The boxes in the plane.
        is_cut_behind: Whether a dim that is not drawn is cut as well: a picture then shows the first of several layers.
    """

    dims: tuple[int, ...]
    parts: list[Rectangle]
    is_cut_behind: bool


@dataclass(frozen=True)
class Grid:
    """The plane, cut at each begin and end of a rectangle, and the ranks of each cell by row and column.

    The elided row and column of cells stand for many in the middle.
    """

    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    elided_row: int | None = None
    elided_col: int | None = None


def rank_of_file(name: str) -> int | None:
    """The rank that wrote a file of a DCP checkpoint, 3 for ``__3_0.distcp``; ``None`` for other names."""
    match = _OF_RANK.match(name.rpartition("/")[2])
    return None if match is None else int(match[1])


def holders_of(boxes: Iterable[tuple[str, Box]]) -> tuple[Holders, str]:
    """The holders of boxes, from the names of their files, and what these holders are: ``"rank"`` or ``"file"``.

    If a name has no rank, each file is a holder, numbered in the order of the names.
    """
    by_file: dict[str, list[Box]] = {}
    for name, box in boxes:
        by_file.setdefault(name, []).append(box)
    numbers, word = _numbers_of(by_file)
    by_number: dict[int, list[Box]] = {}
    for name, number in numbers.items():
        by_number.setdefault(number, []).extend(by_file[name])
    return dict(sorted(by_number.items())), word


def bytes_of_ranks(file_bytes: Mapping[str, int]) -> list[int]:
    """The bytes that each rank wrote, or the size of each file if a name has no rank."""
    numbers, _ = _numbers_of(file_bytes)
    totals = [0] * (max(numbers.values(), default=-1) + 1)
    for name, number in numbers.items():
        totals[number] += file_bytes[name]
    return totals


def _numbers_of(names: Collection[str]) -> tuple[dict[str, int], str]:
    """The rank of each file, in the order of the files, or if a name has no rank its place among the sorted names."""
    ranks = {name: rank_of_file(name) for name in names}
    known = {name: rank for name, rank in ranks.items() if rank is not None}
    if len(known) < len(ranks):
        return {name: place for place, name in enumerate(sorted(names))}, "file"
    return known, "rank"


def plane_of(shape: Sequence[int], holders: Holders) -> Plane:
    """The plane of the two dims that are cut into most parts; the index in all other dims is 0."""
    boxes = [box for held in holders.values() for box in held]
    begins = [{offsets[dim] for offsets, _ in boxes} for dim in range(len(shape))]
    most_cut = sorted(range(len(shape)), key=lambda dim: (-len(begins[dim]), dim))
    dims, behind = sorted(most_cut[:2]), most_cut[2:]
    ranks_of: dict[tuple[tuple[int, int], tuple[int, int]], set[int]] = {}
    for rank, held in holders.items():
        for offsets, sizes in held:
            if 0 in sizes or any(offsets[dim] for dim in behind):
                continue
            spans = [(offsets[dim], offsets[dim] + sizes[dim]) for dim in dims] + [(0, 1), (0, 1)]
            ranks_of.setdefault((spans[0], spans[1]), set()).add(rank)
    parts = [Rectangle(rows, cols, tuple(sorted(ranks))) for (rows, cols), ranks in sorted(ranks_of.items())]
    return Plane(tuple(dims), parts, any(any(begins[dim]) for dim in behind))


def cut_grid(parts: Sequence[Rectangle], *, max_rows: int, max_cols: int) -> Grid:
    """The grid of rectangles; one row or column of cells stands for those in the middle if there are too many."""
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
    """``3``, ``0-15``, ``0-504 by 8``, ``0, 3, 5-7``; at most three pieces."""
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
    """The cuts of at most ``max_bands`` bands, and the band that stands for those left out."""
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
