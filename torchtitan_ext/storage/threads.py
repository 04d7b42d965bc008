"""How many threads a rank may use for files."""

from __future__ import annotations

import os

# More do not make one file faster: the file system lets one writer at a time into it.
MAX_THREADS = 8


def thread_count_of(given: int | None) -> int:
    """The given number, or this rank's share of the machine's cores (``LOCAL_WORLD_SIZE``, which torchrun sets).

    Raises:
        ValueError: The given number is not positive.
    """
    if given is not None:
        if given < 1:
            raise ValueError(f"thread_count: got {given}, expected at least 1")
        return given
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
