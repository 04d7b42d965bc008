"""Reads of a ``RunReader`` whose bytes come from elsewhere, as from an object store: here by whoever asks for them."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_ext import _core


def fetch(
    runs: _core.RunReader, paths: Sequence[Path], verify: str, drawn: random.Random
) -> list[tuple[int, int, int]]:
    """As ``runs.read``, by requests that threads answer in any order; ``paths`` are the files by their numbers."""
    max_gap, max_bytes = drawn.choice([0, 100, 1 << 20]), drawn.choice([1, 1 << 20, 16 << 20])
    requests = runs.requests(verify, max_gap, max_bytes)
    assert all(begin < end for _, begin, end in requests)
    contents = [path.read_bytes() for path in paths]

    def answer(number: int) -> None:
        file, begin, end = requests[number]
        runs.take(number, contents[file][begin:end])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(answer, drawn.sample(range(len(requests)), len(requests))))
    return [(one.file, one.begin, one.end) for one in runs.finish()]
