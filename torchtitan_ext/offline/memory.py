"""How much each of several processes, or threads, may hold at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchtitan_ext.storage.threads import thread_count_of

# A reader and a writer hold a block of 1 MiB per thread, and the writer the last block of its file.
_BLOCKS_PER_THREAD = 2
_BLOCKS_PER_PROCESS = 2
_BLOCK_BYTES = 1 << 20

# Of an element that is cast: float32 of one of eight bits, and three truth values.
_LOOK_BYTES = 7

_LEAST_PART_BYTES = 1 << 20

# Larger ones are no faster: what is read should lie in a cache when it is written.
_MOST_PART_BYTES = 16 << 20


@dataclass(frozen=True)
class Shares:
    """How many processes work, and what each of them may use.

    Attributes:
        part_bytes: What each process reads at a time.
    """

    num_processes: int
    num_threads: int
    part_bytes: int


def room_for_casts(max_bytes: int, saved: Iterable[torch.dtype], dtype: torch.dtype | None) -> int:
    """What is left for tensors of a dtype where those that they are cast from are held beside them, and looked at."""
    ratios = [(kind.itemsize + _LOOK_BYTES) / dtype.itemsize for kind in saved] if dtype is not None else []
    return int(max_bytes / (1 + max(ratios, default=0.0)))


def divide(max_bytes: int, num_processes: int | None) -> Shares:
    """As many processes as were asked for, or cores, and as fit into so many bytes; each with its share of threads."""
    cores = thread_count_of(None)
    wanted = num_processes or cores
    least = _LEAST_PART_BYTES + (_BLOCKS_PER_THREAD + _BLOCKS_PER_PROCESS) * _BLOCK_BYTES
    fitting = max(1, min(wanted, max_bytes // least))
    num_threads = max(1, cores // fitting)
    kept = (_BLOCKS_PER_THREAD * num_threads + _BLOCKS_PER_PROCESS) * _BLOCK_BYTES
    part = min(_MOST_PART_BYTES, max(_LEAST_PART_BYTES, max_bytes // fitting - kept))
    return Shares(fitting, num_threads, part)
