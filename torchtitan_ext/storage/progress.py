"""How far a long save or load is: a bar of tqdm where that is installed, on the coordinator, and on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

# What ends sooner needs no bar.
_DELAY_SECONDS = 2.0

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that were read, written or looked at since its last call."""


@contextmanager
def progress(operation: str, *, is_coordinator: bool, total_bytes: Callable[[], int]) -> Iterator[OnBytes]:
    """Shows the bytes of this rank while it reads or writes, and their rate.

    Args:
        total_bytes: How many there will be; called only where the bar is shown.

    Yields:
        What is to be called with each number of bytes that is done.
    """
    if tqdm is None or not is_coordinator or not _is_terminal():
        yield _ignore
        return
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


def _ignore(num_bytes: int) -> None:
    """In the place of a bar that is not shown."""


def _is_terminal() -> bool:
    # Services have no stderr, a daemon has closed it, and what a job puts in its place may do no more than write.
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
