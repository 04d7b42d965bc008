"""Options that several commands have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from torchtitan_ext.errors import TorchtitanExtError

Only = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only keys that match; can be given again.")]
Prefix = Annotated[str, typer.Option(metavar="KEY", help="Only keys below this one, by the rest of their names.")]
UnsafeUnpickle = Annotated[
    bool, typer.Option("--unsafe-unpickle", help="Run what pickles name: only where you trust them.")
]
MaxMemory = Annotated[str, typer.Option(metavar="BYTES", help="All processes, beside Python and torch.")]
Processes = Annotated[int | None, typer.Option(metavar="N", min=1, help="By default one per core.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST, when the new one is whole.")]

_FACTORS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_LEAST_BYTES = 1 << 20


def amount_of(text: str) -> int:
    """Bytes of ``4GB``, ``512MiB``."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"got {text!r}, expected an amount such as 4GB or 512MiB")
    number, unit, is_binary = match.groups()
    factor = _FACTORS[unit.upper()]
    num_bytes = int(float(number) * (2 ** (10 * "KMGT".index(unit.upper()) + 10) if is_binary and unit else factor))
    if num_bytes < _LEAST_BYTES:
        raise typer.BadParameter(f"got {text!r}, expected at least 1MB")
    return num_bytes


@contextmanager
def refusing_wrong_usage() -> Iterator[None]:
    """Arguments that do not fit what is there are a wrong usage, too."""
    try:
        yield
    except TorchtitanExtError:
        raise
    except FileExistsError as error:
        text = str(error) if error.filename is None else f"{error.filename} {error.strerror}"
        raise typer.BadParameter(text) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
