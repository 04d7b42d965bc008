"""Worlds of which a rank is lost: processes and a TCP store of their own, since ranks are killed and stopped."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gloo_worlds import fork_server
from ports import reserved_port

from torchtitan_ext.ranks import watch

DEADLINE_SECONDS = 10.0
"""How long ranks of such a world wait for each other: these tests wait it out, and for the roll call after it."""

# Far behind every deadline: what ends by it is another error than that of a deadline, and fails the test.
GROUP_TIMEOUT_SECONDS = 300

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


def strike(kind: str) -> None:
    """What happens to the rank that calls: "raise", "interrupt", "sleep" beyond the deadline, "stop" or "kill"."""
    if kind == "raise":
        raise OSError("boom")
    if kind == "sleep":
        time.sleep(DEADLINE_SECONDS + 5)
    else:
        os.kill(os.getpid(), SIGNALS[kind])


def strike_later(kind: str) -> None:
    """Strikes from a thread, in what this rank does over and over by then."""
    threading.Timer(0.2, strike, (kind,)).start()


@contextmanager
def struck_after(seconds: float, kind: str) -> Iterator[None]:
    """Strikes from a thread, unless the block ends before."""
    timer = threading.Timer(seconds, strike, (kind,))
    timer.start()
    yield
    timer.cancel()


def struck_before(function: Callable[..., Any], kind: str, call: int = 1) -> Callable[..., Any]:
    """The function, before whose so manieth call the fault strikes."""
    calls: list[None] = []

    def struck(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            strike(kind)
        return function(*arguments, **options)

    return struck


def strike_when_filled(kind: str, target: torch.Tensor) -> None:
    """Strikes from a thread as soon as the first element of the target has come."""

    def watch_it() -> None:
        while float(target.view(-1)[0]) == 0:
            time.sleep(0.0001)
        strike(kind)

    threading.Thread(target=watch_it, daemon=True).start()


def resting_after(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, behind which there is time for a fault of another thread."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        time.sleep(1.0)
        return result

    return call


def let_go_on(pid: int) -> None:
    """A stopped process goes on."""
    os.kill(pid, signal.SIGCONT)


def ask_to_end(pid: int) -> None:
    """As a launcher that ends a process."""
    os.kill(pid, signal.SIGTERM)


def join_losing_world(rank: int, size: int, port: int) -> None:
    """Makes the process group of such a world, of which rank 0 hosts the store."""
    watch._ANSWER_SECONDS = DEADLINE_SECONDS
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS))


def run_losing_world(
    work: Callable[..., None], *arguments: Any, kind: str, size: int = 3, culprit: int = 1
) -> tuple[dict[int, list[Any]], list[int]]:
    """Runs `work(rank, port, channels, *arguments)` on each rank, which answers twice and ends by `end_rank`.

    A culprit that was stopped goes on when all others have answered. Returns the answers by rank, and the exit codes.
    """
    context = fork_server()
    answers, may_end = context.Queue(), context.Event()
    results: dict[int, list[Any]] = {rank: [] for rank in range(size)}

    def receive(number: int) -> None:
        for _ in range(number):
            rank, *outcome = answers.get()
            results[rank].append(tuple(outcome))

    with reserved_port() as port:
        ranks: list[Any] = [
            context.Process(target=work, args=(rank, port, (answers, may_end), *arguments)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            receive(2 * (size - (kind in ("stop", "kill"))))
            if kind == "stop":
                let_go_on(ranks[culprit].pid)
                receive(2)
            may_end.set()
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return results, [process.exitcode for process in ranks]


def end_rank(channels: Any) -> None:
    """Ends this rank when all have answered: rank 0 hosts the store, in which a rank that was stopped looks."""
    answers, may_end = channels
    may_end.wait()
    answers.close()
    answers.join_thread()
    # The interpreter would wait for collectives that were given up.
    os._exit(0)
