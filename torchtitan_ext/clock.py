"""The one module of the package that asks the time, sleeps, or waits for at most so long.

Its callers write ``clock.now()`` and import none of its functions by name. So a test that replaces these functions
gives the whole package a time of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone


def now() -> float:
    """Seconds since some moment. It never goes back."""
    return time.monotonic()


def wall_seconds() -> float:
    """Seconds since 1970, as the machine believes: other machines believe something else."""
    return time.time()


def utc_now() -> datetime:
    """The same as a date."""
    return datetime.now(timezone.utc)


def sleep(seconds: float) -> None:
    """Returns after so many seconds."""
    time.sleep(seconds)


def wait_for(condition: threading.Condition, is_so: Callable[[], object], seconds: float) -> bool:
    """Whether it became so within these seconds. The caller holds the condition."""
    return bool(condition.wait_for(is_so, seconds))


def wait(event: threading.Event, seconds: float) -> bool:
    """Whether the event was set within these seconds."""
    return event.wait(seconds)


def join(thread: threading.Thread, seconds: float) -> None:
    """Returns when the thread has ended, at the latest after these seconds."""
    thread.join(seconds)
