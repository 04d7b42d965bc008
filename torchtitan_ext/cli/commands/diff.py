"""``torchtitan-ext diff``."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtitan_ext.cli import lazy
from torchtitan_ext.cli.options import (
    Json,
    Only,
    Prefix,
    TransformFile,
    UnsafeUnpickle,
    amount_of,
    refusing_wrong_usage,
    transformed,
)
from torchtitan_ext.cli.output import (
    DIFFERS,
    count_of,
    plain_number,
    print_json,
    print_line,
    print_table,
)
from torchtitan_ext.storage.checkpoint_files import thread_count_of
from torchtitan_ext.storage.location import place_at
from torchtitan_ext.storage.progress import progress

if TYPE_CHECKING:
    from torchtitan_ext.offline.compare.diff import Difference, DiffReport, ValueDifference


def run(
    a: Annotated[Any, typer.Argument(metavar="A", help="A checkpoint of any format.", parser=place_at)],
    b: Annotated[Any, typer.Argument(metavar="B", help="Another one.", parser=place_at)],
    only: Only = None,
    prefix: Prefix = "",
    values: Annotated[bool, typer.Option("--values", help="Say where tensors differ, and how far.")] = False,
    rtol: Annotated[
        float, typer.Option(metavar="X", show_default=False, help="Equal is |a - b| <= atol + rtol * |b|.", min=0.0)
    ] = 0.0,
    atol: Annotated[float, typer.Option(metavar="X", show_default=False, help="The same.", min=0.0)] = 0.0,
    read: Annotated[bool, typer.Option("--read", help="Read tensors with stored fingerprints too.")] = False,
    transform: TransformFile = None,
    max_memory: Annotated[str, typer.Option(metavar="BYTES", help="The memory, beside Python and torch.")] = "256MB",
    unsafe_unpickle: UnsafeUnpickle = False,
    json: Json = False,
) -> None:
    """What two checkpoints differ in: keys, shapes, bits. Any mesh, any format.

    Example: torchtitan-ext diff run/step-100 model.safetensors --prefix model
    """
    with refusing_wrong_usage():
        one, other = (lazy.sources.open_source(path, weights_only=not unsafe_unpickle) for path in (a, b))
        one = transformed(one, transform)
        selection = lazy.selection.Selection(tuple(only or ()), prefix)
        total_bytes = partial(lazy.diff.num_bytes_to_read, one, other, selection, read=read)
        with progress("diff", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = lazy.diff.diff(
                one,
                other,
                selection=selection,
                values=values,
                tolerance=lazy.diff.Tolerance(rtol, atol),
                max_bytes=amount_of(max_memory),
                num_threads=thread_count_of(None),
                read=read,
                progress=on_bytes,
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
    differ = "key differs" if len(report.differences) == 1 else "keys differ"
    are = "is" if report.num_equal == 1 else "are"
    print_line(f"{len(report.differences):,} {differ}, {report.num_equal:,} {are} equal")
    if report.num_unread:
        tensors = count_of(report.num_unread, "tensor")
        print_line(f"{tensors} compared by the fingerprints of the saves, unread; --read reads them")


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
        values |= {name: plain_number(values[name]) for name in ("first_a", "first_b")}
    return {
        "is_equal": not differences,
        "num_equal": report.num_equal,
        "num_unread": report.num_unread,
        "differences": differences,
    }
