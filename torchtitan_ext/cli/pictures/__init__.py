"""Pictures of layouts, of bytes per rank and of differences: text for a terminal, and files by matplotlib.

Every function draws plain values, and none reads a checkpoint.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

import typer

from torchtitan_ext.cli.output import print_problem

_ENDINGS = (".svg", ".png", ".pdf")


def plotter(kind: Literal["layout_plot", "bytes_plot", "difference_plot"], path: Path) -> Any:
    """The module that draws a kind of picture. matplotlib is imported here, since few runs of a command need it.

    To be called before a command begins its work.

    Raises:
        typer.BadParameter: matplotlib is not installed, or the path ends in something that is no picture.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"got {path}, expected a name that ends in {', '.join(_ENDINGS)}", param_hint="--plot")
    try:
        return importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        text = 'pictures need matplotlib; run: pip install "torchtitan-ext[plot]"'
        raise typer.BadParameter(text, param_hint="--plot") from None


def say_written(path: Path) -> None:
    """A line on stderr, so that a JSON document stays one."""
    print_problem(f"wrote {path}")
