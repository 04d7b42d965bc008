"""Refusals that all ranks raise alike: if nothing catches them, rank 0 prints the report, each other rank one line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from torchtitan_ext import clock
from torchtitan_ext.errors.refusals import StateRefusedError

# A launcher ends all ranks when the first one has ended: rank 0 gets the time to print.
_HEAD_START_SECONDS = 0.5

_RANK = "_torchtitan_ext_rank"

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def leave_report_to_rank_0(error: StateRefusedError, rank: int) -> None:
    """Of an error that rank 0 raises too this rank prints one line at the end of the process."""
    setattr(error, _RANK, rank)
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(sys.excepthook)


class _ExceptHook:
    """Prints these errors, and leaves others to the hook that was there: torch has one, which names the rank."""

    def __init__(self, other: _Hook) -> None:
        self._other = other

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = getattr(error, _RANK, None)
        if rank is None:
            self._other(kind, error, trace)
        else:
            _print_line(error, rank, trace)


def _print_line(error: BaseException, rank: int, trace: TracebackType | None) -> None:
    clock.sleep(_HEAD_START_SECONDS)
    own = traceback.extract_tb(trace)[0]
    headline = str(error).partition("\n")[0].rstrip(":")
    print(f"rank {rank}, {own.filename}:{own.lineno}: {headline}, which rank 0 prints", file=sys.stderr)
