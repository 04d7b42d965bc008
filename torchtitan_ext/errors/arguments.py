"""Checks of arguments: what a value is, and the error for one of another type than expected."""

from __future__ import annotations

from numbers import Integral

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
    """Raises ``argument_error`` unless it is an instance of one of these; a class in the place of one is none."""
    if isinstance(got, type) or not isinstance(got, kinds):
        raise argument_error(where, argument, got, expected)


def check_counts(where: str, **counts: object) -> None:
    """Raises ``argument_error`` for the first of these that is neither a whole number nor ``None``."""
    for argument, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, (Integral, type(None))):
            raise argument_error(where, argument, got, "a whole number")
