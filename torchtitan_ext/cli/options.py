"""Options that several commands share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan_ext.cli import lazy
from torchtitan_ext.cli.output import printable
from torchtitan_ext.errors import LayoutError, WrongValueError
from torchtitan_ext.offline.amounts import parse_amount
from torchtitan_ext.offline.rewrite.targets import TargetExistsError
from torchtitan_ext.storage.location import is_url, place_at

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Typer knows no unions: a ``Place``.
Run = Annotated[Any, typer.Argument(metavar="RUN", help="Directory or URL with step-<number> in it.", parser=place_at)]
Source = Annotated[Any, typer.Argument(metavar="SRC", help="A checkpoint of any format, also by URL.", parser=place_at)]
RunOrUrl = Annotated[str, typer.Argument(metavar="RUN", help="Directory or URL with step-<number> in it.")]
StepNames = Annotated[
    str | None,
    typer.Option("--step-pattern", metavar="NAME", help="How steps are named: 'ckpt-{step}'. Common names are known."),
]
Mesh = Annotated[str, typer.Option(metavar="AXES", help="Sizes of axes, for example dp=8,tp=2.")]
Shard = Annotated[
    list[str] | None, typer.Option(metavar="RULE", help="Which dim an axis cuts: '*.wo.weight=tp:1'; repeatable.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Only keys that match, below --prefix; repeatable."),
]
Prefix = Annotated[str, typer.Option(metavar="KEY", help="Only keys below this one, by the rest of their names.")]
UnsafeUnpickle = Annotated[
    bool, typer.Option("--unsafe-unpickle", help="Run what pickles name: only where you trust them.")
]
TransformFile = Annotated[
    Path | None,
    typer.Option("--transform", metavar="JSON", help="Rules: what tensors of the first one become."),
]
MaxMemory = Annotated[str, typer.Option(metavar="BYTES", help="Memory of all processes, for tensors.")]
Processes = Annotated[int | None, typer.Option(metavar="N", min=1, help="By default one per core.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST, when the new one is whole.")]

_OPTION_OF = {
    "mesh": "--mesh",
    "placements": "--shard",
    "components": "--component",
    "only": "--only",
    "prefix": "--prefix",
    "glob": "GLOB",
    "dtype": "--dtype",
    "transform": "--transform",
    "rules": "--transform",
}
"""The option of a command for each argument of the functions that commands call."""

# One block of the storage.
_LEAST_BYTES = 1 << 20


def local_path(text: str) -> Path:
    """A path that is written to; URLs are refused."""
    if is_url(text):
        raise typer.BadParameter(f"got {text}, expected a directory: commands write to disks alone")
    return Path(text)


def amount_of(text: str) -> int:
    """``4GB`` or ``512MiB`` as a number of bytes; less than 1 MiB is a wrong usage."""
    try:
        num_bytes = int(parse_amount(text))
    except WrongValueError as error:
        raise typer.BadParameter(str(error)) from None
    if num_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"got {text!r}, expected at least 1MiB")
    return num_bytes


def transformed(source: Any, transform: Path | None) -> Any:
    """The source as the rules in a file show it; the source itself without a file."""
    if transform is None:
        return source
    try:
        text = transform.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(printable(f"{transform}: {error}"), param_hint="--transform") from None
    return lazy.mapped_files.MappedFiles(source, lazy.rules.Transform.from_json(text))


@contextmanager
def refusing_wrong_usage() -> Iterator[None]:
    """Turns errors about values of options into wrong usages: an impossible value, one that matches nothing in the
    checkpoint, a target that exists."""
    try:
        yield
    except TargetExistsError as error:
        text = f"{error.filename} is there already; pass --overwrite to replace it, or give another DST"
        raise typer.BadParameter(printable(text)) from None
    except FileExistsError as error:
        raise typer.BadParameter(printable(str(error))) from None
    except LayoutError as error:
        if {problem.kind for problem in error.problems} != {"unused_layout"}:
            raise
        text = "; ".join(map(str, error.problems))
        raise typer.BadParameter(printable(text), param_hint="--shard") from None
    except WrongValueError as error:
        raise typer.BadParameter(printable(_in_options(error)), param_hint=_OPTION_OF.get(error.argument)) from None


def _in_options(error: WrongValueError) -> str:
    """The text of an error, with advice in options of the command."""
    if error.remedy is not None and error.remedy.option == "placements":
        return f"{error.detail}; state it with --shard {shlex.quote(str(error.remedy.value))}"
    return f"{error.detail}{error.advice}"
