"""Draws a layout in characters: a grid of cells with their ranks, and row and column numbers at the borders."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_ext.cli.pictures.holders import Grid, Holders, cut_grid, plane_of, text_of_ranks

# Two lines each: a grid fits a terminal of 40 lines.
_MAX_ROWS = 16

_MIN_CELL_WIDTH = 6

# Corners by the sum of the lines that meet there: 1 from above, 2 from below, 4 from the left, 8 from the right.
_CORNERS = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"


def draw_layout(shape: Sequence[int], holders: Holders, *, width: int) -> str:
    """Draws which holder has which part of a tensor. There is no line between cells with the same ranks.

    If there are more rows or columns of cells than fit into ``width`` characters, one stands for all in the middle.
    """
    plane = plane_of(shape, holders)
    if not plane.parts:
        return "no elements"
    explained = [f"dim {plane.dims[0]} downwards, dim {plane.dims[1]} to the right"] if len(shape) > 1 else []
    if plane.is_cut_behind:
        explained.append("another dim is cut as well: this is where its index is 0")
    max_cols = max(1, width // (_MIN_CELL_WIDTH + 1))
    lines = _drawn(cut_grid(plane.parts, max_rows=_MAX_ROWS, max_cols=max_cols), len(shape))
    while max_cols > 1 and max(map(len, lines)) > width:
        max_cols -= 1
        lines = _drawn(cut_grid(plane.parts, max_rows=_MAX_ROWS, max_cols=max_cols), len(shape))
    return "\n".join([*explained, *lines])


def _drawn(grid: Grid, num_dims: int) -> list[str]:
    texts = [[_text(grid, row, col) for col in range(len(cells))] for row, cells in enumerate(grid.ranks)]
    longest = max(len(text) for row in texts for text in row)
    labels = [str(cut) for cut in grid.col_cuts] if num_dims > 1 else [""] * len(grid.col_cuts)
    cell_width = max(_MIN_CELL_WIDTH, longest + 1, *map(len, labels))
    margin = max(len(str(cut)) for cut in grid.row_cuts) if num_dims else 0
    lines = [" " * (margin + 1) + "".join(label.ljust(cell_width + 1) for label in labels).rstrip()]
    for row, cut in enumerate(grid.row_cuts):
        lines.append(f"{cut if num_dims else '':>{margin}} {_border(grid, row, cell_width)}")
        if row < len(texts):
            cells = "".join(
                ("│" if _has_line_beside(grid, row, col) else " ") + text.center(cell_width)
                for col, text in enumerate(texts[row])
            )
            lines.append(f"{'':>{margin}} {cells}│")
    return lines if num_dims > 1 else lines[1:]


def _text(grid: Grid, row: int, col: int) -> str:
    ranks = grid.ranks[row][col]
    return f"... {len(ranks)}" if row == grid.elided_row or col == grid.elided_col else text_of_ranks(ranks)


def _border(grid: Grid, row: int, cell_width: int) -> str:
    """The line above a row of cells, or below the last."""
    line = ""
    for col in range(len(grid.col_cuts)):
        meets = _has_line_beside(grid, row - 1, col) + 2 * _has_line_beside(grid, row, col)
        meets += 4 * _has_line_above(grid, row, col - 1) + 8 * _has_line_above(grid, row, col)
        line += _CORNERS[meets] + ("─" if _has_line_above(grid, row, col) else " ") * cell_width
    return line[:-cell_width]


def _has_line_beside(grid: Grid, row: int, col: int) -> bool:
    """Whether there is a line on the left of a cell; the column after the last has one, too."""
    if not 0 <= row < len(grid.ranks):
        return False
    cells = grid.ranks[row]
    return col in (0, len(cells)) or cells[col - 1] != cells[col]


def _has_line_above(grid: Grid, row: int, col: int) -> bool:
    if not 0 <= col < len(grid.col_cuts) - 1:
        return False
    return row in (0, len(grid.ranks)) or grid.ranks[row - 1][col] != grid.ranks[row][col]
