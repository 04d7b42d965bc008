"""Draws where two tensors differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import FuncFormatter

from torchtitan_ext.cli.pictures.style import GREY, VERMILION, figure_at, set_title

_INCHES = (6.4, 4.8)

# Up to so many cells each get a ring, since a few could be overlooked.
_MAX_RINGS = 12


def plot_differences(
    path: Path,
    title: str,
    counts: Sequence[Sequence[int]],
    *,
    sizes: tuple[int, int],
    cell_sizes: tuple[int, int],
    dims: tuple[int, ...],
) -> None:
    """Draws how many elements of each cell differ, by row and column of cells; cells without differences are grey.

    Sizes and dims are those downwards and to the right: fewer dims for a vector or a single number.
    """
    num_different = sum(map(sum, counts))
    with figure_at(path, inches=_INCHES) as figure:
        axes = figure.add_subplot()
        axes.set(xlim=(0, sizes[1]), ylim=(sizes[0], 0), facecolor=(0.5, 0.5, 0.5, 0.2))
        axes.spines[:].set_visible(False)
        if num_different:
            row_edges, col_edges = (
                [*range(0, size, cell_size), size] for size, cell_size in zip(sizes, cell_sizes, strict=True)
            )
            norm = LogNorm(1, max(2, *map(max, counts)))
            shown = [[count or float("nan") for count in row] for row in counts]
            mesh = axes.pcolormesh(col_edges, row_edges, shown, norm=norm, cmap=_ramp())
            if max(map(max, counts)) > 1:
                bar = figure.colorbar(mesh, ax=axes, label="elements of a cell that differ", pad=0.02, shrink=0.8)
                bar.outline.set_visible(False)
                bar.ax.minorticks_off()
                bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            _ring(axes, counts, row_edges, col_edges)
        _name_sides(axes, dims)
        set_title(axes, title)


def _ramp() -> LinearSegmentedColormap:
    """Plasma without its ends, which could not be seen on a black or a white page."""
    colours = [mpl.colormaps["plasma"](0.35 + 0.55 * step / 15) for step in range(16)]
    return LinearSegmentedColormap.from_list("differences", colours)


def _ring(axes: Axes, counts: Sequence[Sequence[int]], row_edges: Sequence[int], col_edges: Sequence[int]) -> None:
    places = [(row, col) for row, cells in enumerate(counts) for col, count in enumerate(cells) if count]
    if len(places) > _MAX_RINGS or len(col_edges) == 2:
        return
    xs = [(col_edges[col] + col_edges[col + 1]) / 2 for _, col in places]
    ys = [(row_edges[row] + row_edges[row + 1]) / 2 for row, _ in places]
    axes.scatter(xs, ys, s=150, facecolors="none", edgecolors=VERMILION, linewidths=1.5, clip_on=False)


def _name_sides(axes: Axes, dims: tuple[int, ...]) -> None:
    axes.tick_params(color=GREY)
    axes.set_ylabel(f"dim {dims[0]}" if dims else "")
    axes.set_xlabel(f"dim {dims[1]}" if len(dims) > 1 else "")
    if not dims:
        axes.set_yticks([])
    if len(dims) < 2:
        axes.set_xticks([])
