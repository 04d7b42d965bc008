"""Worlds of which a rank is lost: processes and a TCP store of their own, since ranks are killed and stopped."""

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from gloo_worlds import fork_server

# Ends a collective of such a world where no deadline does.
GROUP_TIMEOUT_SECONDS = 120

# What has ended sooner was ended by its deadline, however busy the machine was: 18 s have been seen for what takes 10.
LATEST_SECONDS = GROUP_TIMEOUT_SECONDS / 2


def run_losing_world(
    work: Callable[..., None], *arguments: Any, kind: str, size: int = 3, culprit: int = 1
) -> tuple[dict[int, list[Any]], list[int]]:
    """Runs `work(rank, port, channels, *arguments)` on each rank, which answers twice and ends by `end_rank`.

    A culprit that was stopped goes on when all others have answered. Returns the answers by rank, and the exit codes.
    """
    context = fork_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers, may_end = context.Queue(), context.Event()
    ranks: list[Any] = [
        context.Process(target=work, args=(rank, port, (answers, may_end), *arguments)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, list[Any]] = {rank: [] for rank in range(size)}

    def receive(number: int) -> None:
        for _ in range(number):
            rank, *outcome = answers.get(timeout=90)
            results[rank].append(tuple(outcome))

    try:
        receive(2 * (size - (kind in ("stop", "kill"))))
        if kind == "stop":
            os.kill(ranks[culprit].pid, signal.SIGCONT)
            receive(2)
        may_end.set()
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return results, [process.exitcode for process in ranks]


def end_rank(channels: Any) -> None:
    """Ends this rank when all have answered: rank 0 hosts the store, in which a rank that was stopped looks."""
    answers, may_end = channels
    may_end.wait(60)
    answers.close()
    answers.join_thread()
    # The interpreter would wait for collectives that were given up.
    os._exit(0)
