"""What a sync or check was asked for: the same on every rank, and agreed on before anything moves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torchtitan_ext import ops
from torchtitan_ext.errors import Problem

Buffers = Literal["all", "persistent", "none"]


@dataclass(frozen=True)
class Options:
    """The arguments of all functions of this room; what one does not have keeps its default. See there."""

    src: int = 0
    params: bool = True
    buffers: Buffers = "all"
    ignore: Collection[str] = ()
    verify: bool = False
    locate: bool = False
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES


def option_problems(options: Options) -> list[Problem]:
    """Options of a value that nothing can be done with."""
    problems = []

    def refuse(name: str, value: object, expected: str) -> None:
        problems.append(Problem("cannot_sync", "arguments", f"{name} is {value!r}, expected {expected}"))

    if options.buffers not in ("all", "persistent", "none"):
        refuse("buffers", options.buffers, '"all", "persistent" or "none"')
    is_list = isinstance(options.ignore, Collection) and not isinstance(options.ignore, str)
    if not is_list or not all(isinstance(pattern, str) for pattern in options.ignore):
        refuse("ignore", options.ignore, "a list of names or globs")
    if not isinstance(options.src, int):
        refuse("src", options.src, "a coordinate")
    if not isinstance(options.bucket_bytes, int) or not 0 < options.bucket_bytes < 2**63:
        problems.append(
            Problem("cannot_sync", "bucket_bytes", f"got {options.bucket_bytes!r}, expected a positive int64")
        )
    return problems
