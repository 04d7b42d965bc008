"""``torchtitan-ext diff``."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan_ext.cli.options import Only, Prefix, UnsafeUnpickle, amount_of, refusing_wrong_usage
from torchtitan_ext.cli.output import DIFFERS, print_json, print_table
from torchtitan_ext.cli.progress import byte_progress
from torchtitan_ext.offline.diff import Difference, DiffReport, Tolerance, ValueDifference, diff, num_bytes_to_read
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.threads import thread_count_of


def run(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    only: Only = None,
    prefix: Prefix = "",
    values: Annotated[bool, typer.Option("--values", help="Say where tensors differ, and how far.")] = False,
    rtol: Annotated[float, typer.Option(help="Equal is |a - b| <= atol + rtol * |b|.", min=0.0)] = 0.0,
    atol: Annotated[float, typer.Option(help="The same.", min=0.0)] = 0.0,
    max_memory: Annotated[str, typer.Option(help="For what is read, beside Python and torch.")] = "256MB",
    unsafe_unpickle: UnsafeUnpickle = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What two checkpoints differ in: keys, dtypes, shapes, bits. Meshes and formats may differ.

    Exits with 0 where nothing does, else with 1.

    Example: torchtitan-ext diff run/step-100 exported.safetensors --prefix model --values
    """
    with refusing_wrong_usage():
        sources = [open_source(path, weights_only=not unsafe_unpickle) for path in (a, b)]
        selection = Selection(tuple(only or ()), prefix)
        num_bytes = sum(num_bytes_to_read(source, selection) for source in sources)
        with byte_progress(num_bytes, "diff") as progress:
            report = diff(
                *sources,
                selection=selection,
                values=values,
                tolerance=Tolerance(rtol, atol),
                max_bytes=amount_of(max_memory),
                num_threads=thread_count_of(None),
                progress=progress,
            )
    if json:
        print_json(_as_json(report))
    else:
        _print(report)
    if report.differences:
        raise typer.Exit(DIFFERS)


def _print(report: DiffReport) -> None:
    if report.differences:
        print_table(("key", "differs in", "A", "B", "where"), map(_row, report.differences))
    print(f"{len(report.differences)} keys differ, {report.num_equal} are equal")


def _row(found: Difference) -> tuple[str, str, str, str, str]:
    kind = found.kind.replace("_", " ")
    return found.key, kind, found.a or "-", found.b or "-", _where(found.values)


def _where(values: ValueDifference | None) -> str:
    if values is None:
        return ""
    return (
        f"{values.num_different} of {values.num_elements}, first at {list(values.first_index)}: {values.first_a} and "
        f"{values.first_b}; by at most {values.max_abs:.3g}, relative {values.max_rel:.3g}"
    )


def _as_json(report: DiffReport) -> dict[str, Any]:
    differences = [dataclasses.asdict(found) for found in report.differences]
    for values in filter(None, (found["values"] for found in differences)):
        values |= {name: _plain(values[name]) for name in ("first_a", "first_b")}
    return {"equal": not differences, "num_equal": report.num_equal, "differences": differences}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
