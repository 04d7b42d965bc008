"""Contenders of a benchmark on several ranks, in turns: the slowest rank's time, the least over the rounds."""

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import status_bytes
from torch.distributed.checkpoint.api import CheckpointException

Contenders = dict[str, Callable[[], Any]]
Row = dict[str, Any]


def nothing() -> None:
    pass


def compare(
    contenders: Contenders,
    num_rounds: int,
    *,
    limit: str = "raw",
    before: Callable[[], None] = nothing,
    before_first: Callable[[], None] = nothing,
    after_first: Callable[[], None] = nothing,
) -> dict[str, Row]:
    """Of each contender the least time over the rounds, its ratio to the limit, and its memory. Collective.

    Args:
        contenders: What is timed, by name.
        num_rounds: The first one warms up, measures memory, and counts as well: a minimum does not suffer from it.
        limit: How the names begin of which the fastest is the limit.
        before: Called before each call.
        before_first: Called before each call of the first round too.
        after_first: Called after each call of the first round, to see that it did its work.

    Returns:
        ``seconds``, ``ratio``, and ``megabytes``: the peak of resident memory over what it was before, of the rank with
        most. Of a contender that raised, ``failed``.
    """
    rows: dict[str, Row] = {}
    for name, function in contenders.items():
        before()
        before_first()
        rows[name] = first_call(function, after_first)
    seconds = {name: [row.pop("seconds")] for name, row in rows.items() if "failed" not in row}
    for _ in range(num_rounds - 1):
        for name, spent in seconds.items():
            before()
            dist.barrier()
            spent.append(_largest(_seconds_of(contenders[name])))
    best = min(min(spent) for name, spent in seconds.items() if name.startswith(limit))
    for name, spent in seconds.items():
        rows[name] = {"seconds": round(min(spent), 4), "ratio": round(min(spent) / best, 2), **rows[name]}
    return rows


def first_call(function: Callable[[], Any], check: Callable[[], None] = nothing) -> Row:
    """The time and memory of a call, or why it failed. Collective."""
    gc.collect()
    # Memory that the allocator keeps from the contender before would hide what this one takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident = status_bytes("VmRSS")
    dist.barrier()
    seconds, peak, failure = 0.0, resident, ""
    try:
        seconds = _seconds_of(function)
        peak = status_bytes("VmHWM")
        check()
    except (Exception, CheckpointException) as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        return {"failed": next(filter(None, failures))}
    return {"seconds": _largest(seconds), "megabytes": round(_largest(peak - resident) / 1e6, 1)}


def _seconds_of(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _largest(value: float) -> float:
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def print_rows(title: str, rows: dict[str, Row]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:36} {row['failed']}", flush=True)
        else:
            print(
                f"  {name:36} {row['seconds'] * 1e3:9.1f} ms {row['ratio']:8.2f} {row['megabytes']:8.1f} MB", flush=True
            )
