"""Errors of what comes after the end of an operation: they are printed, and change nothing of how it ended."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def only_printed() -> Iterator[None]:
    """For what one rank logs, warns of or removes when an operation has ended, well or not, on all ranks.

    Were it to raise (a handler of ``logging`` that lets its errors through, a warning that a filter turns into an
    error), this rank would take a checkpoint that is there for failed, and the others would go on. It is printed to
    stderr instead, as ``logging`` prints the errors of handlers, and like these not at all where
    ``logging.raiseExceptions`` is false.
    """
    try:
        yield
    except Exception:
        if logging.raiseExceptions:
            with suppress(Exception):  # a stderr that is closed, or is none
                print("--- torchtitan_ext: the operation has ended; this came after it ---", file=sys.stderr)
                traceback.print_exc(file=sys.stderr)
