"""What commands print: tables for people, JSON for programs, and the exit codes of all of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan_ext.offline.amounts import text_of_bytes as text_of_bytes

FINE = 0
DIFFERS = 1
"""Two checkpoints differ, or one is damaged."""
WRONG_USAGE = 2
UNREADABLE = 3


def print_json(value: Any) -> None:
    """One JSON document on stdout. Keys are part of the interface: docs/cli.md lists them."""
    print(json.dumps(value))


def printable(text: str) -> str:
    """The text with what is no printable character as Python writes it, ``\\x1b`` and so on.

    Names in checkpoints may hold whatever a terminal obeys, and names of files need not be text.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(text: str) -> None:
    """One line on stdout."""
    print(printable(text))


def print_text(text: str) -> None:
    """Several lines on stdout."""
    print("\n".join(map(printable, text.split("\n"))))


def print_problem(text: str, *more: str) -> None:
    """One line on stderr, and below it those of a refusal that lists its problems."""
    print("\n".join(map(printable, (f"torchtitan-ext: {text}", *more))), file=sys.stderr)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their longest cell; numbers to the right. Plain text, so that a thousand rows take no time."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not "".join(map("".join, cells)).isprintable():
        cells = [list(map(printable, row)) for row in cells]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_right = [all(cell[:1].isdigit() for cell in column) and bool(column) for column in zip(*cells, strict=True)]
    sides = [">" if right else "<" for right in is_right] or ["<"] * len(widths)
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    print("\n".join(template.format(*line).rstrip() for line in (titles, *cells)))


def count_of(number: int, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of_time(seconds: float) -> str:
    """A time since 1970, as a date in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
