"""A bar with rate and time left, on stderr, where that is a terminal and tqdm is installed; else nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_progress(num_bytes: int, what: str) -> Iterator[Callable[[int], object]]:
    """Gives a function that is told how many more bytes were dealt with.

    Args:
        num_bytes: How many there will be.
        what: Stands before the bar.
    """
    bar = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            bar = importlib.import_module("tqdm").tqdm
    if bar is None:
        yield lambda count: None
        return
    with bar(total=num_bytes, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False) as shown:
        yield shown.update
