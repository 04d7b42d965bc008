"""Worlds of gloo processes for tests: up to eight workers that live for the whole pytest session.

Starting a process that imports torch costs seconds, starting a process group costs milliseconds. So the workers are
forked once from a server that has imported torch already, and each call of `WorldPool.run` builds a fresh default
process group on the first `world_size` of them, runs one module-level function on every rank and destroys the group:

    def total(rank, world_size, start):
        value = torch.tensor([start + rank])
        dist.all_reduce(value)
        return value.item()

    def test_total(run_world):
        assert run_world(4, total, 10) == [46] * 4

A function that wants several worlds' worth of cases should loop over them inside: that is cheaper still.
"""

import faulthandler
import functools
import gc
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist
from kept_state import kept_state
from tier import SOAK
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan_ext.storage import progress

MAX_WORLD_SIZE = 8

# A collective that waits longer than this fails on its own. Long: on a busy machine with a slow disk a worker that has
# rested for a while may take a minute to come back.
COLLECTIVE_TIMEOUT_SECONDS = 150

# Where the ranks of a world find each other: in memory, where it can be, since a busy disk would keep them waiting.
STORES = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# When one rank has failed, the others usually notice the closed connections at once; then they are killed.
GRACE_SECONDS = 10

# What a thread of ProcessGroupGloo says when Python ends under it: https://github.com/pytorch/pytorch/issues/190489
GLOO_AT_EXIT = "terminate called without an active exception"

# Imported once in the server from which the workers are forked.
PRELOADED = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    *(f"torchtitan_ext.{room}" for room in ("checkpoint", "elastic", "full", "runs", "sync", "transfer", "weights")),
]

# Of these, what the tests of this session have imported: on few cores each worker would take seconds for it.
CLIENTS = ("accelerate", "peft", "transformers")


def fork_server() -> ForkServerContext:
    """How to start processes from the server of this process, which has imported torch and what the tests need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED + [name for name in sys.modules if name.split(".")[0] in CLIENTS])
    return context


class RemoteTraceback(Exception):
    """The traceback of a worker, as text. It is the cause of the exception that `WorldPool.run` raises."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.text}"


class WorldSetUpError(RuntimeError):
    """The process group of a world could not be set up: nothing of the test has run."""


class WorldHungError(RuntimeError):
    """A world that did not answer in time. Its workers have been killed; the next world starts new ones."""


class WorldPool:
    """Long-lived worker processes, started when they are first needed. Not for use from several threads.

    Args:
        backend: Of the default process group of each world.
        set_up: A module-level function that each worker calls first.
    """

    def __init__(self, *, backend: str = "gloo", set_up: Callable[[], None] | None = None) -> None:
        self._backend = backend
        self._set_up = set_up
        self._context = fork_server()
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        process_group: bool = True,
        timeout_seconds: float = 240 * SOAK,
    ) -> list[Any]:
        """Runs `function(rank, world_size, *args)` on every rank of a fresh world and returns the results by rank.

        Args:
            world_size: At most `MAX_WORLD_SIZE`.
            function: A module-level function; it and its results travel as pickles.
            process_group: Whether a default gloo process group is set up around the call.
            timeout_seconds: For the whole call, which does more in the soak. After it the workers are killed.

        Raises:
            The exception of the rank that failed first, whatever its class, with the worker's traceback as its cause.
            WorldSetUpError: The process group could not be set up, not with new workers either.
            WorldHungError: Some ranks did not answer in time.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"run: world_size: got {world_size}, expected 1 to {MAX_WORLD_SIZE}")
        task = pickle.dumps((function, args))
        try:
            return self._run(world_size, task, process_group, timeout_seconds)
        except WorldSetUpError as error:
            warnings.warn(f"a world of {world_size} is set up again with new workers: {error}", stacklevel=2)
            self.close()
            return self._run(world_size, task, process_group, timeout_seconds)

    def _run(self, world_size: int, task: bytes, process_group: bool, timeout_seconds: float) -> list[Any]:
        self._start(world_size)
        with tempfile.TemporaryDirectory(dir=STORES) as folder:
            store_path = os.path.join(folder, "store") if process_group else None
            for rank in range(world_size):
                self._workers[rank][1].send((rank, world_size, self._backend, store_path, task))
            return self._gather(world_size, timeout_seconds)

    def close(self) -> None:
        """Kills all workers."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _start(self, num_workers: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        while len(self._workers) < num_workers:
            ours, theirs = self._context.Pipe()
            # Not a daemon: DCP's process-based async save starts a process of its own in each worker.
            process = self._context.Process(target=serve, args=(theirs, os.getpid(), self._set_up))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _gather(self, world_size: int, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        results: list[Any] = [None] * world_size
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        failure: tuple[int, BaseException, str] | None = None
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                break
            for connection in ready:
                rank = pending.pop(connection)
                answer = receive(*self._workers[rank])
                if answer[0] == "result":
                    results[rank] = answer[1]
                elif failure is None or (is_echo(failure[1]) and not is_echo(answer[1])):
                    failure = (rank, answer[1], answer[2])
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failure is not None:
            raise failure[1] from RemoteTraceback(failure[0], failure[2])
        if pending:
            raise WorldHungError(f"ranks {sorted(pending.values())} of {world_size} gave no answer in time")
        return results


def on_a_gpu(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(rank, world_size, *args)` with a GPU of its own, or one that ranks share if there are fewer."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return function(rank, world_size, *args)


def is_echo(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    return isinstance(error, RuntimeError) and "onnection" in str(error) and "peer" in str(error)


def receive(process: Any, connection: Connection) -> tuple[Any, ...]:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(timeout=GRACE_SECONDS)
        return ("error", RuntimeError(f"the worker process died (exit code {process.exitcode})"), "")


def serve(connection: Connection, parent_pid: int, set_up: Callable[[], None] | None = None) -> None:
    """The main loop of a worker."""
    faulthandler.enable()
    torch.set_num_threads(1)
    # DCP's process executor asks for MASTER_ADDR, else it looks up the name of the machine.
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    show_no_progress()
    if set_up is not None:
        set_up()
    fork_children_from_my_server()
    gc.freeze()
    while True:
        while not connection.poll(timeout=5):
            if os.getppid() == 1 or not is_alive(parent_pid):
                return
        try:
            rank, world_size, backend, store_path, task = connection.recv()
        except EOFError:
            return
        connection.send_bytes(run_task(rank, world_size, backend, store_path, task))


def show_no_progress(set_attribute: Callable[[Any, str, float], object] = setattr) -> None:
    """Whether an operation prints how far it is depends on the speed of the machine: in tests none does."""
    set_attribute(progress, "_DELAY_SECONDS", math.inf)
    set_attribute(progress, "_LINE_SECONDS", math.inf)


def fork_children_from_my_server() -> None:
    """Children that use the fork server come from that of this process, which has imported torch.

    multiprocessing means a process to share the server that it came from, and starts another one all the same.
    """
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_task(rank: int, world_size: int, backend: str, store_path: str | None, task: bytes) -> bytes:
    """Runs one function in one world and returns the pickled answer."""
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if store_path is not None:
            set_up_process_group(rank, world_size, backend, store_path)
        function, args = pickle.loads(task)
        with kept_state(f"{function.__qualname__} on rank {rank}"):
            answer = pickle.dumps(("result", function(rank, world_size, *args)))
        if store_path is not None:
            # Nobody closes a connection on which another rank still works.
            dist.barrier()
    except BaseException as error:
        answer = pickle_error(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        forget_plans()
    return answer


def set_up_process_group(rank: int, world_size: int, backend: str, store_path: str) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    store = dist.FileStore(store_path, world_size)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except Exception as error:
        raise WorldSetUpError(f"rank {rank}: {error}") from error


def forget_meshes() -> None:
    """Empties DTensor's caches: they keep meshes, and a mesh of an earlier world equals the same mesh of this one."""
    _clear_sharding_prop_cache()
    for cached in caches_of_dtensor(sum(name.startswith(DTENSOR) for name in sys.modules)):
        cached.cache_clear()


DTENSOR = "torch.distributed.tensor"


@functools.lru_cache(1)
def caches_of_dtensor(num_modules: int) -> list[Any]:
    """The caches of DTensor's modules, of which so many are imported: a look at every object takes its time."""
    # Not isinstance: it looks through weak proxies, of which torch.compile leaves dead ones.
    caches = [entry for entry in gc.get_objects() if type(entry) is functools._lru_cache_wrapper]
    return [cached for cached in caches if str(getattr(cached, "__module__", "")).startswith(DTENSOR)]


def forget_plans() -> None:
    """Empties the caches of stock's planner and ours: a plan of an earlier world does not fit the ranks of the next."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        getattr(SavePlanner, name).clear()


def pickle_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps(("error", error, text))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), text))
    return answer
