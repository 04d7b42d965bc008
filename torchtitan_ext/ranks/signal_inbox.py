"""Signals of this process as messages to a thread, which acts while the main thread sits in a collective.

Python runs handlers in the main thread, between two of its own instructions: a collective that takes a minute holds
them up. But when the signal comes it writes the number to a descriptor (``signal.set_wakeup_fd``), and a thread reads
it there at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from torchtitan_ext.errors import WrongValueError, argument_error, value_error

# Those of Python, which nobody misses.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)

# What a job, or a terminal, sends to all its processes.
OF_JOBS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SignalInbox:
    """Takes signals until it is closed; handlers that were there are called too. Without names it hears requests alone.

    Attributes:
        chained: The signals that have a handler of the user's own.

    Raises:
        TypeError, ValueError: These are no signals, or none that can be taken here, and all are left alone.
    """

    def __init__(self, where: str, names: Sequence[str]) -> None:
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise argument_error(where, "signals", names, 'names such as ("SIGTERM", "SIGUSR1")')
        for name in names:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise value_error(where, "signals", names, "names of signals that a process can take, such as SIGTERM")
        if names and not _is_main_thread():
            raise WrongValueError(
                f"{where}: got signals={names!r} in a thread; Python takes them in the main thread only"
            )
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._requested = ""
        self._handlers: dict[int, Any] = {}
        if names:
            self._descriptor = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._leave)  # what a child receives is no request to the job
        for name in dict.fromkeys(names):
            before = signal.signal(signal.Signals[name], self._handle)
            self._handlers[signal.Signals[name]] = before or signal.SIG_DFL  # none: one that is not Python's
        self.chained = [signal.Signals(one).name for one, known in self._handlers.items() if known not in _DEFAULTS]

    def request(self, what: str) -> None:
        """Tells the reader, as a signal does. Any thread."""
        self._requested = what
        self.wake()

    def wake(self) -> None:
        """Ends a ``wait``. Any thread."""
        with suppress(OSError):  # full, which wakes as well, or closed
            self._writes.send(b"\0")

    def wait(self, seconds: float) -> str:
        """What has come: the name of a signal, a request, or nothing after so many seconds. One thread calls it."""
        self._reads.settimeout(seconds)
        with suppress(TimeoutError):
            told = self._reads.recv(4096)
            names = [signal.Signals(one).name for one in told if one in self._handlers]
            if names and self._descriptor != -1:
                with suppress(OSError):  # of a library that has ended
                    os.write(self._descriptor, told.replace(b"\0", b""))
            self._requested = self._requested or next(iter(names), "")
        return self._requested

    def close(self) -> None:
        """Gives the signals back, where nobody has taken them since."""
        if not self._handlers or _is_main_thread():  # Python lets no other thread do it
            self._leave()
            self._reads.close()
            self._writes.close()

    def _leave(self) -> None:
        for one in [one for one in self._handlers if signal.getsignal(one) == self._handle]:
            signal.signal(one, self._handlers[one])
        if self._handlers:
            descriptor = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
            if descriptor not in (-1, self._writes.fileno()):
                signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Takes no lock, which the interrupted code may hold."""
        with suppress(OSError):  # said once more: another library may have the descriptor
            self._writes.send(bytes([number]))
        if self._handlers[number] not in _DEFAULTS:
            self._handlers[number](number, frame)


def keep_worker(worker: int = 0) -> None:
    """Lets only its parent end this child by a signal: a ``worker_init_fn`` of ``torch.utils.data.DataLoader``.

    A launcher sends the signals before the end of a job to all its processes, and a worker that dies fails the next
    step. Where the parent has died, SIGTERM of anybody ends it. Called in the main thread of a child of
    ``multiprocessing``, before it starts others: threads and programs that it starts are as deaf.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_JOBS)
    parent = multiprocessing.parent_process()
    assert parent is not None, "not in a child of multiprocessing, please report"
    threading.Thread(target=_end_by_parent, args=(parent.pid, os.getppid()), daemon=True).start()


def keeping_worker(init: Callable[[int], None] | None) -> Callable[[int], None]:
    """A ``worker_init_fn`` that does ``keep_worker``, and then what another one does."""
    return partial(_keep_and_init, init)


@contextmanager
def deaf_child(start_method: str) -> Iterator[None]:
    """A child that this thread starts meanwhile hears no signal of a job before its ``keep_worker``.

    Not by a fork server, which others use too.
    """
    if start_method == "spawn":
        resource_tracker.ensure_running()  # its start would unblock signals
    deaf_to = OF_JOBS if start_method != "forkserver" else ()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep_and_init(init: Callable[[int], None] | None, worker: int) -> None:
    keep_worker(worker)
    if init is not None:
        init(worker)


def _end_by_parent(parent: int | None, started_by: int) -> None:
    while True:
        told = signal.sigwaitinfo(OF_JOBS)
        if told.si_signo == signal.SIGTERM and (told.si_pid == parent or os.getppid() != started_by):
            os._exit(0)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
