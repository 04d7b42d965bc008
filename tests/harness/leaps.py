"""A clock that leaps: time that passes for the package at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def leaping() -> Iterator[Callable[[float], None]]:
    """Gives a function by which so many seconds have passed for this process, as far as it asks Python."""
    ahead, monotonic = [0.0], time.monotonic

    def leap(seconds: float) -> None:
        ahead[0] += seconds

    with mock.patch.object(time, "monotonic", lambda: monotonic() + ahead[0]):
        yield leap
