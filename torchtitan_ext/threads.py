"""Threads beside other code, which have ended before Python does.

A thread that comes out of C++, as out of a question to a store, takes Python's lock. Where Python is ending, the thread
is ended there instead, in a destructor that must not be left so, and the whole process aborts: of a thousand ranks that
end a job, some one would. So such threads are asked to end at exit, and waited for.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torchtitan_ext import clock

# For all threads together. One that hangs longer does not come back before the process is gone.
_LONGEST_SECONDS = 2.0


class BackgroundThread(threading.Thread):
    """A thread that runs from now on, and does not keep the process alive.

    Args:
        run: What it does.
        end: Called at exit by the main thread: ``run`` returns soon after.
    """

    def __init__(self, name: str, run: Callable[[], None], *, end: Callable[[], None]) -> None:
        super().__init__(name=name, target=run, daemon=True)
        self.ask_to_end = end
        _running.add(self)
        with naming_the_limit():
            self.start()


@contextmanager
def naming_the_limit() -> Iterator[None]:
    """Around the start of a thread: an error says what to do."""
    try:
        yield
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise RuntimeError(
            f"{error}; raise the number of threads that this user (ulimit -u) or container (pids.max) may have"
        ) from error


_running: WeakSet[BackgroundThread] = WeakSet()


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in _running if thread.is_alive()]
    for thread in threads:
        thread.ask_to_end()
    deadline = clock.now() + _LONGEST_SECONDS
    for thread in threads:
        clock.join(thread, max(0.0, deadline - clock.now()))
