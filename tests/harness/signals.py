"""Signals that a test sends, and processes that end by them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from eventually import eventually


def die(*_: object, **__: object) -> NoReturn:
    """Kills this process; takes any arguments, so that it can stand for a function that must not be reached."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlives its kill")


def send(number: int, pid: int = 0) -> None:
    """Sends a signal to a process; without one to this process itself."""
    os.kill(pid or os.getpid(), number)


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until_gone(*pids: int) -> None:
    """Returns when all these processes have ended."""
    eventually(lambda: all(map(is_gone, pids)))


def children_by_its_end(process: Any) -> set[int]:
    """Waits until a process of ``multiprocessing`` has ended. Returns the children that it was seen to have."""
    children: set[int] = set()
    while process.exitcode is None:
        with suppress(FileNotFoundError, ProcessLookupError):
            children |= set(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        time.sleep(0.002)
    return children
