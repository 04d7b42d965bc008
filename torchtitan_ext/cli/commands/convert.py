"""``torchtitan-ext convert``."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from torchtitan_ext import clock
from torchtitan_ext.cli import lazy, options
from torchtitan_ext.cli.output import MAX_NAMED, count_of, print_json, print_line, text_of_bytes
from torchtitan_ext.errors import named
from torchtitan_ext.storage.progress import progress


class _Dtype(str, Enum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"


class _Format(str, Enum):
    DCP = "dcp"
    SAFETENSORS = "safetensors"
    HF = "hf"  # the name of safetensors in earlier versions


def run(
    source: options.Source,
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory.", parser=options.local_path)],
    to: Annotated[
        _Format,
        typer.Option(metavar="FORMAT", help="dcp, or safetensors (tensors alone)."),
    ],
    dtype: Annotated[_Dtype | None, typer.Option(metavar="DTYPE", help="Cast floats, for example to bfloat16.")] = None,
    only: options.Only = None,
    prefix: options.Prefix = "",
    max_file_size: Annotated[str, typer.Option(metavar="BYTES", help="Size of safetensors files.")] = "5GB",
    transform: options.TransformFile = None,
    max_memory: options.MaxMemory = "1GB",
    processes: options.Processes = None,
    overwrite: options.Overwrite = False,
    unsafe_unpickle: options.UnsafeUnpickle = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint in another format. DST is whole or as it was.

    Example: torchtitan-ext convert run/step-100 new --to safetensors
    """
    begin = clock.now()
    selection = lazy.selection.Selection(tuple(only or ()), prefix)
    with options.refusing_wrong_usage():
        opened = lazy.sources.open_source(source, weights_only=not unsafe_unpickle)
        opened = options.transformed(opened, transform)
        new_dtype = None if dtype is None else dtype.value
        total_bytes = partial(selection.num_bytes_of, opened, new_dtype)
        with progress("convert", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = lazy.convert.convert(
                opened,
                target,
                to="safetensors" if to is _Format.HF else to.value,
                selection=selection,
                dtype=new_dtype,
                max_file_bytes=options.amount_of(max_file_size),
                overwrite=overwrite,
                max_bytes=options.amount_of(max_memory),
                num_processes=processes,
                progress=on_bytes,
            )
    if json:
        seconds = clock.now() - begin
        print_json({**dataclasses.asdict(report), "path": str(target), "seconds": seconds})
        return
    keys, files = count_of(report.num_keys, "key"), count_of(report.num_files, "file")
    print_line(f"{target}: {keys}, {text_of_bytes(report.num_bytes)} in {files}")
    if report.cast and dtype is not None:
        what = "every value is kept" if report.is_exact else "values are rounded"
        print_line(
            f"cast to {dtype.value}: {count_of(len(report.cast), 'tensor')} ({named(report.cast, MAX_NAMED)}); {what}"
        )
    if report.dropped:
        values = count_of(len(report.dropped), "value")
        print_line(f"dropped, as safetensors hold tensors alone: {values} ({named(report.dropped, MAX_NAMED)})")
