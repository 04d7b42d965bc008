"""Checks of arguments, and a guard for work after the end of an operation, whose errors are only printed."""

from __future__ import annotations

import logging
import pickle
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from types import FrameType
from typing import get_args

from torchtitan_ext.errors.failures import WrongValueError

# A wrong argument is shown where it is short; a long text says no more than its type.
_MAX_SHOWN = 60


def described(value: object) -> str:
    """What a value is, for messages: "a Linear", "the class Linear"; short plain values as they are written."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, bool, type(None))) and len(repr(value)) <= _MAX_SHOWN:
        return repr(value)
    return f"a {type(value).__name__}"


def argument_error(where: str, argument: str, got: object, expected: str) -> TypeError:
    """For an argument of the wrong type: ``load: got policy='reshard', expected an ElasticPolicy``."""
    return TypeError(f"{where}: got {argument}={described(got)}, expected {expected}")


def check_argument(where: str, argument: str, got: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises ``argument_error`` unless ``got`` is an instance of ``kinds``, and for any class."""
    if isinstance(got, type) or not isinstance(got, kinds):
        raise argument_error(where, argument, got, expected)


def value_error(where: str, argument: str, got: object, expected: str) -> WrongValueError:
    """For an argument of a wrong value: ``load: got prove='yes', expected True or False``."""
    return WrongValueError(f"{where}: got {argument}={got!r}, expected {expected}")


def check_choice(where: str, argument: str, got: object, choices: object) -> None:
    """Raises ``value_error`` unless ``got`` is one of the values of a ``Literal``."""
    *most, last = map(repr, get_args(choices))
    if got not in get_args(choices):
        raise value_error(where, argument, got, f"{', '.join(most)} or {last}")


def check_count(where: str, argument: str, got: object) -> None:
    """Raises ``argument_error`` for what is no whole number, and ``value_error`` for one below 1."""
    if isinstance(got, bool) or not isinstance(got, int):
        raise argument_error(where, argument, got, "a whole number")
    if got < 1:
        raise value_error(where, argument, got, "at least 1")


def check_counts(where: str, **counts: object) -> None:
    """Raises ``argument_error`` for the first count that is neither a whole number nor ``None``."""
    for argument, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, (Integral, type(None))):
            raise argument_error(where, argument, got, "a whole number")


@contextmanager
def only_printed() -> Iterator[None]:
    """Prints errors instead of raising them, while one rank logs, warns or removes files after the end of an operation.

    Such an error (of a handler of ``logging``, or a warning that a filter turns into an error) would let this rank take
    a complete checkpoint for failed, and the other ranks would go on. It is printed to stderr as ``logging`` prints the
    errors of handlers: not at all if ``logging.raiseExceptions`` is false.
    """
    try:
        yield
    except Exception:
        if logging.raiseExceptions:
            with suppress(Exception):  # a stderr that is closed, or is none
                print("--- torchtitan_ext: the operation has ended; this came after it ---", file=sys.stderr)
                traceback.print_exc(file=sys.stderr)


def first_line(error: Exception) -> str:
    """The first line of an error's message; torch appends whole stacks."""
    return (str(error).strip().splitlines() or [""])[0]


def readable_error(error: BaseException) -> BaseException:
    """The error, or one with its text where other processes cannot unpickle it (a constructor with keywords only)."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# What storage calls of DCP's save planners: an error that passed through one of them is not storage's.
_OF_PLANNERS = {"set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"}


# Without a number of the operating system: a storage refuses the path that it got.
_OF_CALLS = (FileExistsError, NotADirectoryError)


def is_of_storage(error: BaseException) -> bool:
    """Whether storage failed: an OSError that neither a planner has raised, nor storage about a wrong call."""
    if not isinstance(error, OSError) or (isinstance(error, _OF_CALLS) and error.errno is None):
        return False
    return not any(frame.name in _OF_PLANNERS for frame in traceback.extract_tb(error.__traceback__))


def clear_frames(error: BaseException) -> None:
    """Drops what the functions that raised an error, and those that led to it, still hold."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


_PASSED_OVER = ("torchtitan_ext", "torch", "contextlib", "functools", "concurrent", "threading")
"""Packages whose frames lie between the caller of an operation and its warnings."""


def warn(text: str) -> None:
    """Warns at the line outside of this package and of torch that called; of a thread at the line that warns."""
    frame: FrameType | None = sys._getframe(1)
    depth = 2
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _PASSED_OVER:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=2 if frame is None else depth)
