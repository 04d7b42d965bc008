"""Waits for what happens in another process or thread; how long is pytest's own timeout to say."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T]) -> T:
    """What ``condition()`` returns once that is true."""
    while not (found := condition()):
        time.sleep(0.01)
    return found
