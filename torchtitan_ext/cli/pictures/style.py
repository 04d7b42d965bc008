"""The look of all pictures: readable on a white and on a black page, and for every colour vision.

The background is transparent, words and lines are grey. Ranks are coloured by cividis, which is one ramp from dark to
light for people of any colour vision; kinds of bars by Okabe and Ito's blue and vermilion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# 3.9 to 1 in contrast to white, 4.9 to 1 to the dark page of GitHub.
GREY = "#7d838a"
BLUE, VERMILION = "#0072b2", "#d55e00"
LABEL_POINTS = 8.0

# The number of letters of 10 points that are as wide as a picture.
_TITLE_LETTERS = 72

_STYLE: Any = {
    "font.size": 9.0,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "figure.facecolor": "none",
    # Letters stay letters, so that files are small and can be searched; the same picture is the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchtitan_ext",
}


@contextmanager
def figure_at(path: Path, *, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is written to ``path`` at the end of the ``with``, as svg, png or pdf by the ending of the path."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=inches, dpi=150, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def set_title(axes: Axes, title: str) -> None:
    """Writes a title, smaller if a line is long: keys may have a hundred letters."""
    longest = max(map(len, title.splitlines()))
    axes.set_title(title, size=min(10.0, 10.0 * _TITLE_LETTERS / longest))
