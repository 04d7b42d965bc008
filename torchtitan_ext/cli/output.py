"""Prints tables for people and JSON for programs; the exit codes of all commands."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from torchtitan_ext.errors import Problem
from torchtitan_ext.offline.amounts import text_of_bytes as text_of_bytes

FINE = 0
DIFFERS = 1
"""Two checkpoints differ, or one is damaged."""
WRONG_USAGE = 2
UNREADABLE = 3

FORMAT_NAMES = {"dcp": "DCP", "safetensors": "safetensors", "torch": "torch.save"}
"""The names of formats for people."""

MAX_NAMED = 3
"""So many keys are named in a sentence."""

SCHEMA_VERSION = 2
"""The version of the JSON documents. It grows if a key is removed or changes its meaning, not if a key is added."""


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON document on stdout. Keys are part of the interface: docs/use/command_line.md lists them."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}))


def print_json_error(kind: str, message: str, exit_code: int, problems: Sequence[Problem] = ()) -> None:
    """Prints the JSON document of a command that failed. ``kind``: the exception's class, or ``"Usage"``."""
    rows = [{"kind": one.kind, "key": one.fqn, "what": f"{one.detail}{one.advice}"} for one in problems]
    print_json({"error": {"kind": kind, "message": message, "exit_code": exit_code, "problems": rows}})


def printable(text: str) -> str:
    """The text with unprintable characters escaped as in Python, ``\\x1b`` and so on.

    Names in checkpoints may contain commands for a terminal, and names of files need not be text.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(text: str) -> None:
    """Prints one line on stdout."""
    print(printable(text))


def print_text(text: str) -> None:
    """Prints several lines on stdout."""
    print("\n".join(map(printable, text.split("\n"))))


def print_problem(text: str, *more: str) -> None:
    """Prints one line on stderr, and below it further lines, such as the problems of a refusal."""
    print("\n".join(map(printable, (f"torchtitan-ext: {text}", *more))), file=sys.stderr)


# A number, or an amount: 7, 2,000, 0.5, 256 kB.
_NUMBER = re.compile(r"-?[\d.,]+( [kMGTP]?B)?|-")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints columns as wide as their longest cell, numbers on the right. Plain text: a thousand rows take no time."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not "".join(map("".join, cells)).isprintable():
        cells = [list(map(printable, row)) for row in cells]
    columns = list(zip(*cells, strict=True)) or [()] * len(titles)
    widths = [max(map(len, (title, *column))) for title, column in zip(titles, columns, strict=True)]
    sides = [">" if set(column) - {"-"} and all(map(_NUMBER.fullmatch, column)) else "<" for column in columns]
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    print("\n".join(template.format(*line).rstrip() for line in (titles, *cells)))


def count_of(number: int, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def saved_by(world_size: int, mesh: Mapping[str, int]) -> str:
    """``saved by 8 ranks (dp 4 x tp 2)``."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"saved by {count_of(world_size, 'rank')}{f' ({axes})' if axes else ''}"


def plain_number(value: Any) -> Any:
    """The value, as text if it is a complex number, NaN or infinity, which JSON lacks."""
    is_json = not isinstance(value, (complex, float)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)


def text_of_time(seconds: float) -> str:
    """A time since 1970, as a date in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
