"""Draws layouts, bytes per rank and differences from plain values: text for a terminal, and files by matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import typer

from torchtitan_ext.cli.output import print_problem

_ENDINGS = (".svg", ".png", ".pdf")


def plotter(path: Path) -> Any:
    """The module that draws pictures. It imports matplotlib, which few runs of a command need.

    Commands call this before they begin their work, so that refusals (no matplotlib, no picture's ending) come first.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"got {path}, expected a name that ends in {', '.join(_ENDINGS)}", param_hint="--plot")
    try:
        return importlib.import_module(f"{__name__}.plots")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        text = 'pictures need matplotlib; run: pip install "torchtitan-ext[plot]"'
        raise typer.BadParameter(text, param_hint="--plot") from None


def say_written(path: Path) -> None:
    """Prints a line on stderr, since stdout may have a JSON document."""
    print_problem(f"wrote {path}")
