"""A clock that leaps: time that passes for the package at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torchtitan_ext import clock


@contextmanager
def leaping() -> Iterator[Callable[[float], None]]:
    """Gives a function by which so many seconds have passed for the package in this process."""
    ahead, now = [0.0], clock.now

    def leap(seconds: float) -> None:
        ahead[0] += seconds

    with mock.patch.object(clock, "now", lambda: now() + ahead[0]):
        yield leap
