"""How far a long save, load or command is, on stderr: a bar of tqdm on a terminal, otherwise lines now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

# What ends sooner needs neither bar nor line.
_DELAY_SECONDS = 2.0

# Lines are not written over, as a bar is: an hour makes 360.
_LINE_SECONDS = 10.0

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that were read, written or looked at since its last call."""


@contextmanager
def progress(
    operation: str, *, is_coordinator: bool, total_bytes: Callable[[], int], in_logs: bool = True
) -> Iterator[OnBytes]:
    """Shows the bytes of this rank while it reads or writes, and their rate.

    Args:
        total_bytes: How many there will be; called only where something is shown.
        in_logs: Whether lines are printed where stderr is no terminal; a job has a log of its own.

    Yields:
        What is to be called with each number of bytes that is done.
    """
    is_terminal = _is_terminal()
    if not is_coordinator or not (is_terminal or in_logs):
        yield _ignore
    elif tqdm is None or not is_terminal:
        yield _Lines(operation, total_bytes).advance
    else:
        with tqdm(
            total=total_bytes(),
            desc=operation,
            unit="B",
            unit_scale=True,
            delay=_DELAY_SECONDS,
            leave=False,
            dynamic_ncols=True,
        ) as bar:
            yield bar.update


class _Lines:
    """Prints a line now and then; arguments as of ``progress``."""

    def __init__(self, operation: str, total_bytes: Callable[[], int]) -> None:
        self._operation = operation
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._begin = time.monotonic()
        self._next = self._begin + _DELAY_SECONDS

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        now = time.monotonic()
        if now < self._next or sys.stderr is None:
            return
        self._next = now + _LINE_SECONDS
        seconds = now - self._begin
        megabytes, total = self._num_bytes / 1e6, self._total_bytes() / 1e6
        line = f"{self._operation}: {megabytes:,.0f} of {total:,.0f} MB in {seconds:.0f} s"
        with suppress(Exception):  # what a job puts in the place of stderr is no reason to fail
            print(line, file=sys.stderr, flush=True)


def _ignore(num_bytes: int) -> None:
    """In the place of what is not shown."""


def _is_terminal() -> bool:
    # Services have no stderr, a daemon has closed it, and what a job puts in its place may do no more than write.
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
