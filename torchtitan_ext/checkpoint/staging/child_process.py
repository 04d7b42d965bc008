"""A child process that calls functions for its parent, one after the other, and ends when the parent does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO, TypeVar

from torchtitan_ext.errors import readable_error
from torchtitan_ext.ranks.signal_inbox import deaf_child, keep_worker

T = TypeVar("T")

START_METHOD = "spawn"
"""Of children. They have nothing of the parent's threads and devices, as a fork would."""


class ChildProcess:
    """Started by ``START_METHOD``.

    Attributes:
        group_name: What the processes of all ranks agreed to call their group; ``None`` where they have none.
    """

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context(START_METHOD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="torchtitan_ext.save", daemon=True)
        with deaf_child(START_METHOD):
            self._process.start()
        theirs.close()
        self.group_name: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., T], *arguments: Any, file: BinaryIO | None = None) -> T:
        """Calls a function of a module in the child and waits for its result.

        Args:
            file: An open file that the child gets as the last argument, as a file descriptor of its own.

        Raises:
            RuntimeError: The child died.
            Exception: What the function raised.
        """
        try:
            self._connection.send_bytes(pickle.dumps((function, arguments, file is not None)))
            if file is not None:
                assert self._process.pid is not None
                send_handle(self._connection, file.fileno(), self._process.pid)
            result, error = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as lost:
            self._process.join(5)
            raise RuntimeError(
                f"the process that saves for this rank died (exit code {self._process.exitcode}) before it was done; "
                "if it printed what your script prints, put the script's work under if __name__ == '__main__'"
            ) from lost
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    keep_worker()  # the parent decides what becomes of a save
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            function, arguments, has_file = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if has_file:
            arguments = (*arguments, recv_handle(connection))
        answer: tuple[Any, BaseException | None]
        try:
            answer = function(*arguments), None
        except Exception as error:
            answer = None, readable_error(error)
        connection.send_bytes(pickle.dumps(answer))
        # What the call held may be the parent's memory, which the parent cannot give back before.
        del function, arguments, answer
        gc.collect()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
