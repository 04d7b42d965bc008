"""Runs tasks in several forked processes, and divides memory between them.

Forked processes have the metadata that their parent has read.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from torchtitan_ext.errors import WorkerLostError
from torchtitan_ext.storage.checkpoint_files import thread_count_of
from torchtitan_ext.storage.progress import OnBytes

_Result = TypeVar("_Result")

_PR_SET_PDEATHSIG = 1


def run_tasks(
    task: Callable[[int, OnBytes], _Result], num_tasks: int, num_processes: int, progress: OnBytes
) -> list[_Result]:
    """The results of ``task(number, progress)`` for all numbers. The first error ends all processes and is raised.

    One process, or one task, runs in the calling process. Forked processes die with their parent, however it ends.

    Raises:
        WorkerLostError: A process was killed.
        RuntimeError: Several processes are asked for, but CUDA or a process group, which no fork survives, is in use.
    """
    num_processes = min(num_processes, num_tasks)
    if num_processes <= 1:
        return [task(number, progress) for number in range(num_tasks)]
    torch: Any = sys.modules.get("torch")
    if torch and (torch.cuda.is_initialized() or (dist := torch.distributed).is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"got num_processes={num_processes} in a process that uses CUDA or a process group, which cannot be "
            "forked; pass num_processes=1, or use the command line"
        )
    workers = _start_workers(task, num_tasks, num_processes)
    results: dict[int, _Result] = {}
    try:
        while workers:
            for receiver in wait(list(workers)):
                assert isinstance(receiver, Connection)
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    workers[receiver].join()
                    raise WorkerLostError(workers[receiver].exitcode) from None
                if kind == "error":
                    raise content
                if kind == "end":
                    workers.pop(receiver).join()
                elif kind == "progress":
                    progress(content)
                else:
                    results |= content
    finally:
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.join()
    return [results[number] for number in range(num_tasks)]


def _start_workers(task: Callable[[int, OnBytes], Any], num_tasks: int, num_processes: int) -> dict[Connection, Any]:
    """Forks processes that take numbers of tasks in turn; each is found by the pipe on which it answers."""
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, Any] = {}
    next_task = context.Value("q", 0)
    for _ in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (task, num_tasks, next_task, sender, os.getpid())
        worker = context.Process(target=_work, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns that threads may hold locks: the only other thread keeps the lock of the save.
            warnings.simplefilter("ignore", DeprecationWarning)
            worker.start()
        sender.close()
        workers[receiver] = worker
    return workers


def _work(task: Callable[[int, OnBytes], Any], num_tasks: int, next_task: Any, sender: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        return
    try:
        while True:
            with next_task.get_lock():
                number = next_task.value
                next_task.value = number + 1
            if number >= num_tasks:
                # Exit codes are lost where SIGCHLD is ignored, as a parent may have left it.
                sender.send(("end", None))
                return
            result = task(number, lambda num_bytes: sender.send(("progress", num_bytes)))
            sender.send(("result", {number: result}))
    except Exception as error:
        sender.send(("error", error))


# A reader and a writer hold a block of 1 MiB per thread, and the writer the last block of its file.
_BLOCKS_PER_THREAD = 2
_BLOCKS_PER_PROCESS = 2
_BLOCK_BYTES = 1 << 20

_LEAST_PART_BYTES = 1 << 20

# Larger parts are no faster: a part should still lie in a cache when it is written.
_MOST_PART_BYTES = 16 << 20


@dataclass(frozen=True)
class Shares:
    """How many processes work, with how many threads each; each process reads ``part_bytes`` at a time."""

    num_processes: int
    num_threads: int
    part_bytes: int


def divide(max_bytes: int, num_processes: int | None) -> Shares:
    """As many processes as were asked for, by default one per core, that fit into ``max_bytes``; they share cores."""
    cores = thread_count_of(None)
    wanted = num_processes or cores
    least = _LEAST_PART_BYTES + (_BLOCKS_PER_THREAD + _BLOCKS_PER_PROCESS) * _BLOCK_BYTES
    fitting = max(1, min(wanted, max_bytes // least))
    num_threads = max(1, cores // fitting)
    kept = (_BLOCKS_PER_THREAD * num_threads + _BLOCKS_PER_PROCESS) * _BLOCK_BYTES
    part = min(_MOST_PART_BYTES, max(_LEAST_PART_BYTES, max_bytes // fitting - kept))
    return Shares(fitting, num_threads, part)
