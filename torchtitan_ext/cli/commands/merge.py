"""``torchtitan-ext merge``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from torchtitan_ext.cli import lazy, options
from torchtitan_ext.cli.output import count_of, print_dropped, print_json, print_line, text_of_bytes
from torchtitan_ext.errors import named
from torchtitan_ext.storage.location import place_at
from torchtitan_ext.storage.progress import progress


class _Accumulate(str, Enum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class _Others(str, Enum):
    EQUAL = "equal"
    LAST = "last"


class Command(TyperCommand):
    """Takes ``--weights 0.3 0.7`` for ``--weights 0.3 --weights 0.7``: an option of typer has one value at a time."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_each_weight(args)))


def run(
    sources: Annotated[list[Any], typer.Argument(metavar="SRC", help="Checkpoints, any format.", parser=place_at)],
    target: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DST", help="A directory; --to torch: a file.", parser=options.local_path
        ),
    ],
    weights: Annotated[
        list[float] | None,
        typer.Option(metavar="X ...", help="One for each SRC; a mean divides them by their sum."),
    ] = None,
    is_sum: Annotated[bool, typer.Option("--sum", help="Take the weights as they are: a weighted sum.")] = False,
    accumulate: Annotated[
        _Accumulate, typer.Option(metavar="DTYPE", help="Of sums: float64 too.")
    ] = _Accumulate.FLOAT32,
    others: Annotated[_Others, typer.Option(metavar="HOW", help="Integers, values: equal, or last.")] = _Others.EQUAL,
    to: Annotated[
        options.Format | None,
        typer.Option(metavar="FORMAT", help="dcp, safetensors, torch; else that of the last SRC."),
    ] = None,
    only: options.Only = None,
    prefix: options.Prefix = "",
    max_file_size: options.MaxFileSize = "5GB",
    max_memory: options.MaxMemory = "1GB",
    processes: options.Processes = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write the weighted mean of several checkpoints. DST is whole or as it was.

    Example: torchtitan-ext merge step-1 step-2 --weights 0.3 0.7 -o mean
    """
    begin = time.perf_counter()
    selection = lazy.selection.Selection(tuple(only or ()), prefix)
    with options.refusing_wrong_usage():
        opened = [lazy.sources.open_source(source) for source in sources]
        total_bytes = partial(selection.within(opened[-1]).num_bytes_of, opened[-1])
        with progress("merge", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = lazy.merge.merge(
                opened,
                target,
                to=None if to is None else to.kind,
                weights=weights,
                kind="sum" if is_sum else "mean",
                accumulate=accumulate.value,
                others=others.value,
                selection=selection,
                max_file_bytes=options.amount_of(max_file_size),
                overwrite=overwrite,
                max_bytes=options.amount_of(max_memory),
                num_processes=processes,
                progress=on_bytes,
            )
    if json:
        print_json({**dataclasses.asdict(report), "path": str(target), "seconds": time.perf_counter() - begin})
        return
    keys, files = count_of(report.num_keys, "key"), count_of(report.num_files, "file")
    print_line(f"{target}: {keys}, {text_of_bytes(report.num_bytes)} in {files}")
    factors = named([f"{weight:.6g} * {source}" for weight, source in zip(report.weights, report.sources, strict=True)])
    print_line(f"weighted {'sum' if is_sum else 'mean'}: {factors}")
    print_dropped(report.dropped)


def _with_each_weight(args: list[str]) -> Iterator[str]:
    before, is_weight = "", False
    for arg in args:
        is_weight = arg.partition("=")[0] == "--weights" or (is_weight and _is_number(arg))
        if is_weight and _is_number(arg) and before != "--weights":
            yield "--weights"
        yield arg
        before = arg


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
