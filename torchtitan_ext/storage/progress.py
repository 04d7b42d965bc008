"""Shows the progress of long operations on stderr: a bar of tqdm on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torchtitan_ext import clock

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

# An operation that ends sooner shows nothing.
_DELAY_SECONDS = 2.0

# Each line stays in the log: an hour makes 360.
_LINE_SECONDS = 10.0

OnBytes = Callable[[int], object]
"""Called with the number of bytes that were read, written or checked since its last call."""


@contextmanager
def progress(
    operation: str, *, is_coordinator: bool, total_bytes: Callable[[], int], in_logs: bool = True
) -> Iterator[OnBytes]:
    """Shows the bytes of this rank while it reads or writes, and their rate.

    Args:
        total_bytes: Gives the expected number of bytes; called only if something is shown.
        in_logs: Whether to print lines if stderr is no terminal.

    Yields:
        A function to call with each number of bytes that is done.
    """
    is_terminal = _is_terminal()
    if not is_coordinator or not (is_terminal or in_logs):
        yield lambda num_bytes: None
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
    def __init__(self, operation: str, total_bytes: Callable[[], int]) -> None:
        self._operation = operation
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._begin = clock.now()
        self._next = self._begin + _DELAY_SECONDS

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        now = clock.now()
        if now < self._next or sys.stderr is None:
            return
        self._next = now + _LINE_SECONDS
        seconds = now - self._begin
        megabytes, total = self._num_bytes / 1e6, self._total_bytes() / 1e6
        line = f"{self._operation}: {megabytes:,.0f} of {total:,.0f} MB in {seconds:.0f} s"
        with suppress(Exception):  # a job may replace stderr by an object that cannot print
            print(line, file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    # A service has no stderr, a daemon has closed it, and a job may replace it by an object that can only write.
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
