"""Draws which rank holds which rows and columns of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle as Patch
from matplotlib.ticker import MaxNLocator

from torchtitan_ext.cli.pictures.holders import Holder, Plane, Rectangle, plane_of, text_of_ranks
from torchtitan_ext.cli.pictures.style import GREY, LABEL_POINTS, figure_at, set_title

_INCHES = (6.4, 4.8)

# The size of the part of the picture that has the boxes, about.
_PLANE_POINTS = (360.0, 280.0)

_MAX_TICKS = 9

# The width of a letter and the height of a line, as parts of the letter's height, about.
_LETTER_WIDTH = 0.62
_LINE_HEIGHT = 1.3

# A name may reach into a neighbouring box only if the colours differ by less than this part of the scale.
_ALIKE = 0.2


def plot_layout(path: Path, title: str, shape: Sequence[int], holders: Sequence[Holder], *, holder: str) -> None:
    """Draws the boxes of all ranks, or files, by the word ``holder``; names as many as there is room for."""
    plane = plane_of(shape, holders)
    parts = plane.parts
    height = max((part.rows[1] for part in parts), default=1)
    width = max((part.cols[1] for part in parts), default=1)
    norm = Normalize(0, max([1, *(part.ranks[-1] for part in parts)]))
    colours = ScalarMappable(norm, mpl.colormaps["cividis"])
    with figure_at(path, inches=_INCHES) as figure:
        axes = figure.add_subplot()
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.spines[:].set_visible(False)
        per_point = (width / _PLANE_POINTS[0], height / _PLANE_POINTS[1])
        _draw_boxes(axes, parts, colours, per_point)
        _name_ranks(axes, parts, norm, per_point)
        _name_sides(axes, plane)
        set_title(axes, title)
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
    axes.add_collection(PatchCollection(patches, facecolors=faces, edgecolors=GREY, linewidths=widths))


def _name_ranks(axes: Axes, parts: Sequence[Rectangle], norm: Normalize, per_point: tuple[float, float]) -> None:
    """Writes the ranks into their boxes where names neither touch each other nor leave the picture."""
    named: list[tuple[float, float, float, float]] = []  # left, right, top, bottom
    right, bottom = axes.get_xlim()[1], axes.get_ylim()[0]
    for part in parts:
        text = text_of_ranks(part.ranks)
        x, y = sum(part.cols) / 2, sum(part.rows) / 2
        half_width = LABEL_POINTS * _LETTER_WIDTH * (len(text) + 1) / 2 * per_point[0]
        half_height = LABEL_POINTS * _LINE_HEIGHT / 2 * per_point[1]
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
        axes.text(x, y, text, color=colour, size=LABEL_POINTS, ha="center", va="center")


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
