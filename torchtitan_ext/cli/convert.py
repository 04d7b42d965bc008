"""``torchtitan-ext convert``."""

from __future__ import annotations

import dataclasses
import time
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtitan_ext.cli.lazy import lazy
from torchtitan_ext.cli.options import (
    Json,
    MaxMemory,
    Only,
    Overwrite,
    Prefix,
    Processes,
    UnsafeUnpickle,
    amount_of,
    refusing_wrong_usage,
)
from torchtitan_ext.cli.output import count_of, print_json, print_line, text_of_bytes
from torchtitan_ext.storage.progress import progress

if TYPE_CHECKING:
    from torchtitan_ext.offline import convert as converting
    from torchtitan_ext.offline import selection as selecting
    from torchtitan_ext.offline import sources
else:
    converting = lazy("torchtitan_ext.offline.convert")
    selecting = lazy("torchtitan_ext.offline.selection")
    sources = lazy("torchtitan_ext.offline.sources")

_MAX_NAMED = 3


class _Format(str, Enum):
    DCP = "dcp"
    HF = "hf"
    TORCH = "torch"


def run(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory; with --to torch a file.")],
    to: Annotated[
        _Format, typer.Option(metavar="dcp|hf|torch", help="DCP, safetensors (tensors alone), or torch.save.")
    ],
    only: Only = None,
    prefix: Prefix = "",
    max_file_size: Annotated[str, typer.Option(metavar="BYTES", help="Of safetensors files.")] = "5GB",
    max_memory: MaxMemory = "1GB",
    processes: Processes = None,
    overwrite: Overwrite = False,
    unsafe_unpickle: UnsafeUnpickle = False,
    json: Json = False,
) -> None:
    """Write a checkpoint in another format. DST is whole or as it was.

    Example: torchtitan-ext convert run/step-100 exported --to hf --prefix model
    """
    begin = time.perf_counter()
    selection = selecting.Selection(tuple(only or ()), prefix)
    with refusing_wrong_usage():
        opened = sources.open_source(source, weights_only=not unsafe_unpickle)
        total_bytes = partial(selection.num_bytes_of, opened)
        with progress("convert", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = converting.convert(
                opened,
                target,
                to=to.value,
                selection=selection,
                max_file_bytes=amount_of(max_file_size),
                overwrite=overwrite,
                max_bytes=amount_of(max_memory),
                num_processes=processes,
                weights_only=not unsafe_unpickle,
                progress=on_bytes,
            )
    if json:
        seconds = time.perf_counter() - begin
        print_json({**dataclasses.asdict(report), "path": str(target), "seconds": seconds})
        return
    keys, files = count_of(report.num_keys, "key"), count_of(report.num_files, "file")
    print_line(f"{target}: {keys}, {text_of_bytes(report.num_bytes)} in {files}")
    if report.dropped:
        named = ", ".join(report.dropped[:_MAX_NAMED])
        more = ", ..." if len(report.dropped) > _MAX_NAMED else ""
        print_line(
            f"dropped, as safetensors hold tensors alone: {count_of(len(report.dropped), 'value')} ({named}{more})"
        )
