"""Draws the bytes of each rank, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from torchtitan_ext.cli.output import text_of_bytes
from torchtitan_ext.cli.pictures.style import BLUE, GREY, VERMILION, figure_at, set_title

_INCHES = (6.4, 4.4)

# With more ranks bars touch each other: gaps would be wider than bars.
_MAX_SINGLE_BARS = 64

# Bars of a tenth of the height still show which are lower.
_MAX_RATIO = 10


def plot_bytes(path: Path, before: Sequence[int], after: Sequence[int], *, title: str) -> None:
    """Draws the bytes of each rank before and after, below each other, each with a line at the mean.

    Both have one scale, unless the bars of one would be too low to see. ``before`` is empty if it is not known.
    """
    rows = [("before", before, BLUE), ("after", after, VERMILION)]
    rows = [row for row in rows if row[1]]
    highest = [max(1, *num_bytes) for _, num_bytes, _ in rows]
    has_one_scale = max(highest) <= _MAX_RATIO * min(highest)
    with figure_at(path, inches=(_INCHES[0], _INCHES[1] * (1 + len(rows)) / 3)) as figure:
        figure.suptitle(title, x=0.01, ha="left", size=10.0)
        for place, (when, num_bytes, colour) in enumerate(rows):
            axes = figure.add_subplot(len(rows), 1, place + 1)
            axes.set_ylim(0, 1.12 * (max(highest) if has_one_scale else highest[place]))
            _draw_ranks(axes, num_bytes, colour)
            set_title(axes, f"{when}: {_summary(num_bytes)}{'' if has_one_scale else ' (its own scale)'}")


def _draw_ranks(axes: Axes, num_bytes: Sequence[int], colour: str) -> None:
    count = len(num_bytes)
    if count <= _MAX_SINGLE_BARS:
        axes.bar(range(count), num_bytes, width=0.8, color=colour)
    else:
        axes.stairs(num_bytes, [rank - 0.5 for rank in range(count + 1)], fill=True, color=colour)
    axes.axhline(sum(num_bytes) / count, color=GREY, linewidth=1.0, linestyle="--")
    axes.set(xlim=(-0.6, count - 0.4), xlabel="rank")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of_bytes(value)))


def _summary(num_bytes: Sequence[int]) -> str:
    mean = sum(num_bytes) / len(num_bytes)
    ranks = f"{len(num_bytes)} rank{'s' if len(num_bytes) > 1 else ''}"
    least, most, average = map(text_of_bytes, (min(num_bytes), max(num_bytes), mean))
    return f"{ranks}, {average} each" if least == most else f"{ranks}, {least} to {most}, {average} on average"
