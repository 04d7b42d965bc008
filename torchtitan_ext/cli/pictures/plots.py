"""Draws pictures by matplotlib: which rank holds what of a tensor, the bytes of ranks, where two tensors differ.

All pictures are readable on a white and on a black page, and for every colour vision. The background is transparent,
words and lines are grey. Ranks are coloured by cividis, which is one ramp from dark to light for people of any colour
vision; kinds of bars by Okabe and Ito's blue and vermilion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle as Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from torchtitan_ext.cli.output import text_of_bytes
from torchtitan_ext.cli.pictures.holders import Holders, Plane, Rectangle, plane_of, text_of_ranks

# 3.9 to 1 in contrast to white, 4.9 to 1 to the dark page of GitHub.
_GREY = "#7d838a"
_BLUE, _VERMILION = "#0072b2", "#d55e00"
_LABEL_POINTS = 8.0

# The number of letters of 10 points that are as wide as a picture.
_TITLE_LETTERS = 72

_STYLE: Any = {
    "font.size": 9.0,
    "text.color": _GREY,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "figure.facecolor": "none",
    # Letters stay letters, so that files are small and can be searched; the same picture is the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchtitan_ext",
}

_INCHES = (6.4, 4.8)

# The size of the part of the picture that has the boxes, about.
_PLANE_POINTS = (360.0, 280.0)

_MAX_TICKS = 9

# The width of a letter and the height of a line, as parts of the letter's height, about.
_LETTER_WIDTH = 0.62
_LINE_HEIGHT = 1.3

# A name may reach into a neighbouring box only if the colours differ by less than this part of the scale.
_ALIKE = 0.2

# With more ranks bars touch each other: gaps would be wider than bars.
_MAX_SINGLE_BARS = 64

# Bars of a tenth of the height still show which are lower.
_MAX_RATIO = 10

# Up to so many cells each get a ring, since a few could be overlooked.
_MAX_RINGS = 12


def plot_layout(path: Path, title: str, shape: Sequence[int], holders: Holders, *, holder: str) -> None:
    """Draws the boxes of all ranks, or files, by the word ``holder``; names as many as there is room for."""
    plane = plane_of(shape, holders)
    parts = plane.parts
    height = max((part.rows[1] for part in parts), default=1)
    width = max((part.cols[1] for part in parts), default=1)
    norm = Normalize(0, max([1, *(part.ranks[-1] for part in parts)]))
    colours = ScalarMappable(norm, mpl.colormaps["cividis"])
    with _figure_at(path) as figure:
        axes = figure.add_subplot()
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.spines[:].set_visible(False)
        per_point = (width / _PLANE_POINTS[0], height / _PLANE_POINTS[1])
        _draw_boxes(axes, parts, colours, per_point)
        _name_ranks(axes, parts, norm, per_point)
        _name_sides(axes, plane)
        _set_title(axes, title)
        if len(parts) > 1:
            ticks = MaxNLocator(nbins=_MAX_TICKS, integer=True)
            bar = figure.colorbar(colours, ax=axes, label=holder, ticks=ticks, pad=0.02, shrink=0.8)
            bar.outline.set_visible(False)


def _draw_boxes(
    axes: Axes, parts: Sequence[Rectangle], colours: ScalarMappable, per_point: tuple[float, float]
) -> None:
    patches = [
        Patch((part.cols[0], part.rows[0]), part.cols[1] - part.cols[0], part.rows[1] - part.rows[0]) for part in parts
    ]
    wide = [min(patch.get_width() / per_point[0], patch.get_height() / per_point[1]) for patch in patches]
    faces = colours.to_rgba(np.array([part.ranks[0] for part in parts], dtype=float))
    # A border must not hide its box.
    widths = [0.6 if points >= 10 else 0.25 if points >= 3 else 0.0 for points in wide]
    axes.add_collection(PatchCollection(patches, facecolors=faces, edgecolors=_GREY, linewidths=widths))


def _name_ranks(axes: Axes, parts: Sequence[Rectangle], norm: Normalize, per_point: tuple[float, float]) -> None:
    """Writes the ranks into their boxes where names neither touch each other nor leave the picture."""
    named: list[tuple[float, float, float, float]] = []  # left, right, top, bottom
    right, bottom = axes.get_xlim()[1], axes.get_ylim()[0]
    for part in parts:
        text = text_of_ranks(part.ranks)
        x, y = sum(part.cols) / 2, sum(part.rows) / 2
        half_width = _LABEL_POINTS * _LETTER_WIDTH * (len(text) + 1) / 2 * per_point[0]
        half_height = _LABEL_POINTS * _LINE_HEIGHT / 2 * per_point[1]
        place = (x - half_width, x + half_width, y - half_height, y + half_height)
        if place[0] < 0 or place[1] > right or place[2] < 0 or place[3] > bottom:
            continue
        if any(_touch(place, other) for other in named):
            continue
        shade = norm(part.ranks[0])
        below = (norm(other.ranks[0]) for other in parts if _touch(place, (*other.cols, *other.rows)))
        if any(abs(shade - other) > _ALIKE for other in below):
            continue
        named.append(place)
        colour = "white" if shade < 0.5 else "black"
        axes.text(x, y, text, color=colour, size=_LABEL_POINTS, ha="center", va="center")


def _touch(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _name_sides(axes: Axes, plane: Plane) -> None:
    dims = plane.dims
    axes.set_yticks(_ticks({cut for part in plane.parts for cut in part.rows}) if dims else [])
    axes.set_xticks(_ticks({cut for part in plane.parts for cut in part.cols}) if len(dims) > 1 else [])
    if len(dims) > 1:
        behind = "; where the index of other dims is 0" if plane.is_cut_behind else ""
        axes.set_xlabel(f"dim {dims[1]}{behind}")
    if dims:
        axes.set_ylabel(f"dim {dims[0]}")


def _ticks(cuts: set[int]) -> list[int]:
    """The begins and ends of boxes; if they are many, every second, third, ... and the last."""
    ordered = sorted(cuts)
    stride = max(1, -(-len(ordered) // _MAX_TICKS))
    return [*ordered[:-1:stride], *ordered[-1:]]


def plot_bytes(path: Path, before: Sequence[int], after: Sequence[int], *, title: str) -> None:
    """Draws the bytes of each rank before and after, below each other, each with a line at the mean.

    Both have one scale, unless the bars of one would be too low to see. ``before`` is empty if it is not known.
    """
    rows = [("before", before, _BLUE), ("after", after, _VERMILION)]
    rows = [row for row in rows if row[1]]
    highest = [max(1, *num_bytes) for _, num_bytes, _ in rows]
    has_one_scale = max(highest) <= _MAX_RATIO * min(highest)
    with _figure_at(path, inches=(_INCHES[0], 4.4 * (1 + len(rows)) / 3)) as figure:
        figure.suptitle(title, x=0.01, ha="left", size=10.0)
        for place, (when, num_bytes, colour) in enumerate(rows):
            axes = figure.add_subplot(len(rows), 1, place + 1)
            axes.set_ylim(0, 1.12 * (max(highest) if has_one_scale else highest[place]))
            _draw_ranks(axes, num_bytes, colour)
            _set_title(axes, f"{when}: {_summary(num_bytes)}{'' if has_one_scale else ' (its own scale)'}")


def _draw_ranks(axes: Axes, num_bytes: Sequence[int], colour: str) -> None:
    count = len(num_bytes)
    if count <= _MAX_SINGLE_BARS:
        axes.bar(range(count), num_bytes, width=0.8, color=colour)
    else:
        axes.stairs(num_bytes, [rank - 0.5 for rank in range(count + 1)], fill=True, color=colour)
    axes.axhline(sum(num_bytes) / count, color=_GREY, linewidth=1.0, linestyle="--")
    axes.set(xlim=(-0.6, count - 0.4), xlabel="rank")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of_bytes(value)))


def _summary(num_bytes: Sequence[int]) -> str:
    mean = sum(num_bytes) / len(num_bytes)
    ranks = f"{len(num_bytes)} rank{'s' if len(num_bytes) > 1 else ''}"
    least, most, average = map(text_of_bytes, (min(num_bytes), max(num_bytes), mean))
    return f"{ranks}, {average} each" if least == most else f"{ranks}, {least} to {most}, {average} on average"


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
    with _figure_at(path) as figure:
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
        _name_dims(axes, dims)
        _set_title(axes, title)


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
    axes.scatter(xs, ys, s=150, facecolors="none", edgecolors=_VERMILION, linewidths=1.5, clip_on=False)


def _name_dims(axes: Axes, dims: tuple[int, ...]) -> None:
    axes.tick_params(color=_GREY)
    axes.set_ylabel(f"dim {dims[0]}" if dims else "")
    axes.set_xlabel(f"dim {dims[1]}" if len(dims) > 1 else "")
    if not dims:
        axes.set_yticks([])
    if len(dims) < 2:
        axes.set_xticks([])


@contextmanager
def _figure_at(path: Path, *, inches: tuple[float, float] = _INCHES) -> Iterator[Figure]:
    """A figure that is written to ``path`` at the end of the ``with``, as svg, png or pdf by the ending of the path."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=inches, dpi=150, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _set_title(axes: Axes, title: str) -> None:
    """Writes a title, smaller if a line is long: keys may have a hundred letters."""
    longest = max(map(len, title.splitlines()))
    axes.set_title(title, size=min(10.0, 10.0 * _TITLE_LETTERS / longest))
