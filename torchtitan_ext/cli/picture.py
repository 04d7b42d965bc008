"""Draws which rank holds which part of a tensor, by matplotlib, from the names of files. Imports no torch.

A tensor is drawn by two of its dims: those that are cut into most parts. The picture is readable on a white and on a
black page, and for every colour vision: its background is transparent, words and lines are grey, ranks are coloured by
cividis, one ramp from dark to light.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from torchtitan_ext.layout.layout import Box

# No cluster has more ranks: a longer number in a file's name is no rank.
_OF_RANK = re.compile(r"__(\d{1,7})_")

# 3.9 to 1 in contrast to white, 4.9 to 1 to the dark page of GitHub.
_GREY = "#7d838a"

_STYLE: Any = {
    "font.size": 9.0,
    "text.color": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "figure.facecolor": "none",
    # Letters stay letters, so that files are small and can be searched; the same picture is the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchtitan_ext",
}

_MAX_TICKS = 9

_COLOURS = "cividis"

# The number of letters of 10 points that are as wide as a picture.
_TITLE_LETTERS = 72

# So many letters of a rank's name fit beside each other in the part with the boxes, and so many lines below.
_LETTERS, _LINES = 72, 27

_Span = tuple[int, int]
_Parts = dict[tuple[_Span, _Span], set[int]]
"""The ranks that hold each box in the plane that is drawn, by its rows and columns, half-open."""


def plot_holders(path: Path, title: str, shape: Sequence[int], boxes: Sequence[tuple[str, Box]]) -> None:
    """Draws the boxes of a tensor, each with the file that has it, and names as many ranks as there is room for.

    If the name of a file has no rank, each file counts as one, numbered in the order of the names.
    """
    numbers, holder = _numbers_of({name for name, _ in boxes})
    dims, parts = _parts_of(shape, [(numbers[name], box) for name, box in boxes])
    height = max((rows[1] for rows, _ in parts), default=1)
    width = max((cols[1] for _, cols in parts), default=1)
    highest = max([1, *map(min, parts.values())])
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.spines[:].set_visible(False)
        for (rows, cols), ranks in sorted(parts.items()):
            _draw_box(axes, rows, cols, sorted(ranks), min(ranks) / highest)
        axes.set_yticks(_ticks({cut for rows, _ in parts for cut in rows}) if dims else [])
        axes.set_xticks(_ticks({cut for _, cols in parts for cut in cols}) if len(dims) > 1 else [])
        axes.set(**{f"{axis}label": f"dim {dim}" for axis, dim in zip("yx", dims, strict=False)})
        axes.set_title(title, size=min(10.0, 10.0 * _TITLE_LETTERS / max(map(len, title.splitlines()))))
        if len(parts) > 1:
            ticks = MaxNLocator(nbins=_MAX_TICKS, integer=True)
            colours = ScalarMappable(Normalize(0, highest), mpl.colormaps[_COLOURS])
            bar = figure.colorbar(colours, ax=axes, label=holder, ticks=ticks, pad=0.02, shrink=0.8)
            bar.outline.set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _numbers_of(names: Collection[str]) -> tuple[dict[str, int], str]:
    """The rank that wrote each file, 3 for ``__3_0.distcp``; if a name has no rank, the places of the sorted names."""
    matches = {name: _OF_RANK.match(name.rpartition("/")[2]) for name in names}
    ranks = {name: int(match[1]) for name, match in matches.items() if match is not None}
    if len(ranks) < len(matches):
        return {name: place for place, name in enumerate(sorted(names))}, "file"
    return ranks, "rank"


def _parts_of(shape: Sequence[int], boxes: Sequence[tuple[int, Box]]) -> tuple[list[int], _Parts]:
    """The two dims that are cut into most parts, and the boxes in their plane where the index of other dims is 0."""
    num_begins = [len({offsets[dim] for _, (offsets, _) in boxes}) for dim in range(len(shape))]
    most_cut = sorted(range(len(shape)), key=lambda dim: (-num_begins[dim], dim))
    dims, behind = sorted(most_cut[:2]), most_cut[2:]
    parts: _Parts = {}
    for rank, (offsets, sizes) in boxes:
        if 0 not in sizes and not any(offsets[dim] for dim in behind):
            rows, cols = (*((offsets[dim], offsets[dim] + sizes[dim]) for dim in dims), (0, 1), (0, 1))[:2]
            parts.setdefault((rows, cols), set()).add(rank)
    return dims, parts


def _draw_box(axes: Axes, rows: _Span, cols: _Span, ranks: Sequence[int], shade: float) -> None:
    """Draws a box in a colour from dark, 0, to light, 1, and the names of its ranks if they fit into it."""
    width, height = cols[1] - cols[0], rows[1] - rows[0]
    letters, lines = _LETTERS * width / axes.get_xlim()[1], _LINES * height / axes.get_ylim()[0]
    # A border must not hide its box.
    border = 0.6 if lines >= 1 and letters >= 2 else 0.0
    axes.add_patch(Rectangle((cols[0], rows[0]), width, height, fc=mpl.colormaps[_COLOURS](shade), ec=_GREY, lw=border))
    text = ", ".join(map(str, ranks))
    if lines >= 1 and letters > len(text):
        colour = "white" if shade < 0.5 else "black"
        axes.text(sum(cols) / 2, sum(rows) / 2, text, color=colour, size=8.0, ha="center", va="center")


def _ticks(cuts: set[int]) -> list[int]:
    """The begins and ends of boxes; if they are many, every second, third, ... and the last."""
    ordered = sorted(cuts)
    stride = max(1, -(-len(ordered) // _MAX_TICKS))
    return [*ordered[:-1:stride], *ordered[-1:]]
