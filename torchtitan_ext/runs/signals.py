"""Signals of this process as messages to a thread, which acts while the main thread sits in a collective.

Python runs handlers in the main thread, between two of its own instructions: a collective or a kernel that takes a
minute holds them up. But at the signal itself it writes the number to a descriptor (``signal.set_wakeup_fd``), from
which a thread reads it at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

from torchtitan_ext.errors import WrongValueError, argument_error, value_error

# Python's own, which are no handlers of a user.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


def checked_signals(where: str, names: object) -> list[signal.Signals]:
    """Raises TypeError or ValueError of names that are no signals, or of signals that cannot be taken here."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise argument_error(where, "signals", names, 'names such as ("SIGTERM", "SIGUSR1")')
    for name in names:
        if not isinstance(name, str) or name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise value_error(where, "signals", names, "names of signals that a process can take, such as SIGTERM")
        if signal.getsignal(signal.Signals[name]) is None:
            raise WrongValueError(
                f"{where}: {name} has a handler that is not Python's, such as faulthandler's, and cannot be called by "
                "another one; leave it out of signals, or unregister it"
            )
    if names and threading.current_thread() is not threading.main_thread():
        raise WrongValueError(
            f"{where}: got signals={names!r} in the thread {threading.current_thread().name}; Python takes signals in "
            "the main thread only: make the manager there"
        )
    return [signal.Signals[name] for name in dict.fromkeys(names)]


class SignalInbox:
    """Takes signals until it is closed. The handlers that were there are called as before.

    Without signals it only wakes its reader. Made and closed in the main thread if there are signals.

    Attributes:
        chained: The signals that have a handler of the user's own.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._requested = ""
        self._fd_before = -1
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        if signals:
            self._fd_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            _open.add(self)
        for one in signals:
            self._before[one] = signal.signal(one, self._handle)
        handlers = {one: before for one, before in self._before.items() if before not in _DEFAULTS}
        self.chained = [signal.Signals(one).name for one in handlers]

    def request(self, why: str) -> None:
        """As if a signal had come. Any thread."""
        self._requested = why
        self.wake()

    def wake(self) -> None:
        """Ends a ``wait``. Any thread."""
        with suppress(OSError):  # full, which wakes as well, or closed
            self._writes.send(b"\0")

    def wait(self, seconds: float) -> str:
        """What was requested, or nothing after so many seconds, or when it was woken. One thread calls it."""
        self._reads.settimeout(seconds)
        try:
            told = self._reads.recv(4096)
        except TimeoutError:
            return self._requested
        if self._fd_before != -1:
            with suppress(OSError):  # of a library that has ended
                os.write(self._fd_before, told.replace(b"\0", b""))
        names = [signal.Signals(one).name for one in told if one in self._before]
        return self._requested or (names[0] if names else "")

    def close(self) -> None:
        """Gives the signals back, where nobody has taken them since."""
        if self._before and threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread do it
        self.leave()
        self._reads.close()
        self._writes.close()

    def leave(self) -> None:
        """Gives the signals back. The child of a fork calls it: what it receives is no request to the job."""
        _open.discard(self)
        for one, before in self._before.items():
            if signal.getsignal(one) == self._handle:
                signal.signal(one, before)
        if self._before:
            other = signal.set_wakeup_fd(self._fd_before, warn_on_full_buffer=False)
            if other not in (-1, self._writes.fileno()):
                signal.set_wakeup_fd(other, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Takes no lock, which the interrupted code may hold."""
        with suppress(OSError):  # said once more, in case that another library has the descriptor
            self._writes.send(bytes([number]))
        before = self._before[number]
        if callable(before) and before not in _DEFAULTS:
            before(number, frame)


_open: WeakSet[SignalInbox] = WeakSet()


def _leave_all() -> None:
    for inbox in list(_open):
        inbox.leave()


os.register_at_fork(after_in_child=_leave_all)
