"""Shows which rank holds which part of a tensor, from the files of its chunks. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import typer

from torchtitan_ext._core import KeySummary
from torchtitan_ext.cli.output import count_of, print_json, print_text, saved_by
from torchtitan_ext.cli.pictures import plotter, say_written
from torchtitan_ext.cli.pictures.holders import Holders, holders_of
from torchtitan_ext.cli.pictures.text import draw_layout
from torchtitan_ext.errors.near_names import nearest_name
from torchtitan_ext.storage.formats.contents import Contents


def show_layout(contents: Contents, name: str, plot: Path | None, *, json: bool) -> None:
    """Prints which rank holds which part of a tensor, and draws a picture if ``plot`` names a file."""
    key = _tensor(contents, name)
    shape = key.sizes or ()
    boxes = [
        (chunk.file or contents.path.name, (tuple(chunk.offsets), tuple(chunk.sizes)))
        for chunk in contents.chunks_of(name)
        if chunk.offsets is not None and chunk.sizes is not None
    ]
    holders, holder = holders_of(boxes)
    size, mesh = contents.world_size, contents.mesh
    origin = saved_by(size, mesh) if size else f"in {count_of(len(contents.files), 'file')}"
    title = f"{name}, {' x '.join(map(str, shape)) or 'a single number'}, {key.dtype}\n{origin}"
    if plot is not None:
        plotter(plot).plot_layout(plot, title, shape, holders, holder=holder)
        say_written(plot)
    if json:
        print_json(_plain(key, holders, holder))
        return
    print_text(f"{title}; each cell has the {holder} that holds it")
    print_text(draw_layout(shape, holders, width=shutil.get_terminal_size().columns))


def _tensor(contents: Contents, name: str) -> KeySummary:
    tensors = {key.fqn: key for key in contents.keys if key.sizes is not None}
    if name not in tensors:
        near = nearest_name(name, tensors)
        hint = "" if near is None else f"; did you mean {near}?"
        raise typer.BadParameter(f"{contents.path} has no tensor {name}{hint}", param_hint="--layout")
    return tensors[name]


def _plain(key: KeySummary, holders: Holders, holder: str) -> dict[str, Any]:
    rows = [
        {holder: rank, "boxes": [{"offsets": offsets, "sizes": sizes} for offsets, sizes in boxes]}
        for rank, boxes in holders.items()
    ]
    return {"name": key.fqn, "dtype": key.dtype, "shape": key.sizes, "held_by": holder, "holders": rows}
