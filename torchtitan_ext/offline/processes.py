"""Several processes that share the work of one: forked, so that they have what was read of the checkpoint already."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from torchtitan_ext.errors import WorkerLostError
from torchtitan_ext.storage.progress import OnBytes

_Result = TypeVar("_Result")

_PR_SET_PDEATHSIG = 1


def run_tasks(
    task: Callable[[int, OnBytes], _Result], num_tasks: int, num_processes: int, progress: OnBytes
) -> list[_Result]:
    """Results of ``task(number, progress)`` for all numbers. The first that fails ends all, and is raised.

    With one process, or one task, they run in this one. Others live no longer than it does, however it ends.

    Raises:
        WorkerLostError: A process was killed.
        RuntimeError: Several processes are asked for where CUDA or a process group is in use, which no fork survives.
    """
    num_processes = min(num_processes, num_tasks)
    if num_processes <= 1:
        return [task(number, progress) for number in range(num_tasks)]
    if torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"got num_processes={num_processes} in a process that uses CUDA or a process group, which cannot be "
            "forked; pass num_processes=1, or use the command line"
        )
    return _Workers(task, num_tasks, num_processes).run(progress)


class _Workers(Generic[_Result]):
    def __init__(self, task: Callable[[int, OnBytes], _Result], num_tasks: int, num_processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._results: dict[int, _Result] = {}
        self._num_tasks = num_tasks
        self._workers: dict[Connection, Any] = {}
        next_task = context.Value("q", 0)
        for _ in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (task, num_tasks, next_task, sender, os.getpid())
            worker = context.Process(target=_work, args=arguments, daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, whose locks may be held: those here only touch the lock of the save.
                warnings.simplefilter("ignore", DeprecationWarning)
                worker.start()
            sender.close()
            self._workers[receiver] = worker

    def run(self, progress: OnBytes) -> list[_Result]:
        try:
            while self._workers:
                for receiver in wait(list(self._workers)):
                    self._take(receiver, progress)  # type: ignore[arg-type]
        finally:
            for worker in self._workers.values():
                worker.kill()
            for worker in self._workers.values():
                worker.join()
        return [self._results[number] for number in range(self._num_tasks)]

    def _take(self, receiver: Connection, progress: OnBytes) -> None:
        try:
            kind, *content = receiver.recv()
        except EOFError:
            worker = self._workers.pop(receiver)
            worker.join()
            if worker.exitcode != 0:
                raise WorkerLostError(worker.exitcode) from None
            return
        if kind == "error":
            raise content[0]
        if kind == "progress":
            progress(content[0])
        else:
            number, result = content
            self._results[number] = result


def _work(task: Callable[[int, OnBytes], Any], num_tasks: int, next_task: Any, sender: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        return
    try:
        while True:
            with next_task.get_lock():
                number = next_task.value
                next_task.value = number + 1
            if number >= num_tasks:
                return
            result = task(number, lambda num_bytes: sender.send(("progress", num_bytes)))
            sender.send(("result", number, result))
    except Exception as error:
        sender.send(("error", error))
