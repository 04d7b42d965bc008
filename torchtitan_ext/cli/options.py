"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from torchtitan_ext.cli.output import printable
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.offline.amounts import parse_amount

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory with step-<number> in it.")]
Mesh = Annotated[str, typer.Option(metavar="AXES", help="Sizes of axes, for example dp=8,tp=2.")]
Shard = Annotated[
    list[str] | None, typer.Option(metavar="RULE", help="Which dim an axis cuts: '*.wo.weight=tp:1'; repeatable.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Only keys whose names, without --prefix, match; can be given again."),
]
Prefix = Annotated[str, typer.Option(metavar="KEY", help="Only keys below this one, by the rest of their names.")]
UnsafeUnpickle = Annotated[
    bool, typer.Option("--unsafe-unpickle", help="Run what pickles name: only where you trust them.")
]
MaxMemory = Annotated[str, typer.Option(metavar="BYTES", help="All processes, beside Python and torch.")]
Processes = Annotated[int | None, typer.Option(metavar="N", min=1, help="By default one per core.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST, when the new one is whole.")]

# Less is not enough for one block of the storage.
_LEAST_BYTES = 1 << 20


def amount_of(text: str) -> int:
    """Bytes of ``4GB``, ``512MiB``; less than 1 MiB is a wrong usage."""
    try:
        num_bytes = int(parse_amount(text))
    except WrongValueError as error:
        raise typer.BadParameter(str(error)) from None
    if num_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"got {text!r}, expected at least 1MiB")
    return num_bytes


@contextmanager
def refusing_wrong_usage() -> Iterator[None]:
    """Makes of a wrong value of an argument, and of a target that is there already, a wrong usage of the command."""
    try:
        yield
    except FileExistsError as error:
        text = str(error) if error.filename is None else f"{error.filename} {error.strerror}"
        raise typer.BadParameter(printable(text)) from None
    except WrongValueError as error:
        raise typer.BadParameter(printable(str(error))) from None
