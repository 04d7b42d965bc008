"""One save at a time in one place: a lock file names its owner, the thread that saves.

The file is made only where none is; flock means different things on network file systems. Its first line names the
owner. A lock is dead if

- its owner ran on this machine and that thread has ended, or is the calling thread: a thread runs one save at a time,
  so its earlier save has failed;
- its owner, which touches the file every ``HEARTBEAT_SECONDS``, has not touched it for ``STALE_SECONDS``.

A save takes over a dead lock. If two saves take over at once, or the owner only slept, ``check`` finds it: saves call
it right before the commit, and do not touch each other's files until then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import weakref
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from torchtitan_ext import clock
from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.threads import naming_the_limit

HEARTBEAT_SECONDS = 10.0

# Twelve missed beats: a process that is stopped, or a file server that hangs, for a minute is not dead.
STALE_SECONDS = 120.0

# The clocks of two machines may differ: a lock that looks stale is watched for so long before it counts as dead.
_WATCH_SECONDS = 2.5 * HEARTBEAT_SECONDS

# The clocks of two machines do not differ by so much.
_VERY_OLD_SECONDS = 86_400.0

# Between making the file and writing its line lie two system calls.
_EMPTY_SECONDS = 2.0

_NAME = "torchtitan_ext.save_lock"

# NFS says ESTALE of a file that another machine removes while it is opened.
_GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Owner:
    """The thread that saves.

    Attributes:
        path: The target of the save.
        host: The host name, in which copies of a virtual machine differ.
        machine: The ids of the kernel's boot and of its process namespace, in which containers differ.
        started: Start of the thread in ticks since the boot: thread ids are used again.
        time: Start of the save in seconds since 1970, for messages.
    """

    save_id: str
    path: str
    host: str
    machine: str
    pid: int
    thread: int
    started: str
    time: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {since}"


@dataclass(frozen=True)
class LockState:
    """The content of a lock file, and when it was last touched.

    Attributes:
        owner: ``None`` if the first line is not complete.
        lines: The lines after the first.
    """

    owner: Owner | None
    lines: list[str]
    inode: int
    touched: float


class SaveLock:
    """A lock that this thread holds until ``release``. A second thread touches the file as long as the object lives.

    A signal handler may raise anywhere in here, and the thread lives on: then the file goes with the object at last.

    Raises:
        FileExistsError: There is a lock.
    """

    _file: BinaryIO | None = None

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.owner = owner
        self._released = threading.Event()
        try:
            self._file = os.fdopen(_make(path, json.dumps(asdict(owner))), "wb", buffering=0)
            arguments = (os.dup(self._file.fileno()), self._released, weakref.ref(self))
            with naming_the_limit():
                threading.Thread(target=_keep_alive, args=arguments, name=_NAME, daemon=True).start()
        except BaseException:
            self.release()
            raise

    def __del__(self) -> None:
        # A fork has a copy of the object, and the lock is its parent's.
        if self._file is not None and not self._file.closed and self.owner.pid == os.getpid():
            with contextlib.suppress(OSError):
                self._remove()

    @classmethod
    def acquire(cls, path: Path, save_id: str, target: Path) -> SaveLock:
        """Takes the lock; removes a dead one.

        Raises:
            SaveInProgressError: Another save holds the lock.
        """
        owner = _this_thread(save_id, target)
        while True:
            try:
                return cls(path, owner)
            except FileExistsError:
                remove_dead_lock(path)

    def add_line(self, text: str) -> None:
        assert self._file is not None, "a lock without its file, please report"
        _append_line(self._file.fileno(), text)

    def check(self) -> None:
        """Raises SaveInProgressError if another save has taken the lock over."""
        state = read_lock(self.path)
        if state is None or state.owner != self.owner:
            raise _in_progress(self.path, self.owner.path, None if state is None else state.owner)

    def release(self) -> None:
        """Removes the file, unless another save has taken the lock over. What an interrupt ends can be called again."""
        if not self._released.is_set():
            self._remove()
            self._released.set()

    def _remove(self) -> None:
        """Takes no lock: garbage may be collected anywhere."""
        state = read_lock(self.path)
        if state is not None and state.owner == self.owner:
            self.path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()


def read_lock(path: Path) -> LockState | None:
    """The state of a lock; ``None`` without a lock file."""
    try:
        # The open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            status = os.fstat(descriptor)
            *lines, _ = stream.read().split("\n")
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link, which no save has made, so it has no owner
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                return LockState(None, [], status.st_ino, status.st_mtime)
        elif error.errno not in _GONE:
            raise
        return None
    try:
        owner = Owner(**json.loads(lines[0]))
    except (IndexError, TypeError, ValueError):
        return LockState(None, [], status.st_ino, status.st_mtime)
    return LockState(owner, lines[1:], status.st_ino, status.st_mtime)


def remove_dead_lock(path: Path) -> Owner | None:
    """Removes a dead lock, and returns its owner.

    Raises:
        SaveInProgressError: The lock is not dead.
    """
    state = read_lock(path)
    if state is None:
        return None
    if not is_dead(path, state):
        raise _in_progress(path, "" if state.owner is None else state.owner.path, state.owner)
    current = read_lock(path)
    # A new file may get the inode number of the one that was just removed.
    if current is not None and (current.inode, current.owner) == (state.inode, state.owner):
        path.unlink(missing_ok=True)
    return state.owner


def is_dead(path: Path, state: LockState) -> bool:
    """Whether no save holds this lock any more. Watches the lock of another machine for a while first."""
    if state.owner is None:
        return _stays_untouched(path, state, _EMPTY_SECONDS)
    if is_surely_dead(state):
        return True
    # Also where it was touched in the future: one of the clocks was wrong.
    return abs(clock.wall_seconds() - state.touched) > STALE_SECONDS and _stays_untouched(path, state, _WATCH_SECONDS)


def is_surely_dead(state: LockState) -> bool:
    """Whether a lock is dead for sure, without watching it: its owner ran on this machine, or it is very old."""
    owner = state.owner
    if owner is not None and (owner.machine, owner.host) == (_machine(), socket.gethostname()):
        if (owner.pid, owner.thread) == (os.getpid(), threading.get_native_id()):
            return True
        return _has_ended(owner)
    return clock.wall_seconds() - state.touched > _VERY_OLD_SECONDS


def _stays_untouched(path: Path, state: LockState, seconds: float) -> bool:
    deadline = clock.now() + seconds
    while clock.now() < deadline:
        clock.sleep(min(0.1, seconds))
        current = read_lock(path)
        if current != state:
            return False
    return True


def _in_progress(lock: Path, path: str, owner: Owner | None) -> SaveInProgressError:
    return SaveInProgressError(path or str(lock.parent), "another process" if owner is None else str(owner), str(lock))


def _keep_alive(descriptor: int, released: threading.Event, lock: weakref.ref[SaveLock]) -> None:
    try:
        while not clock.wait(released, HEARTBEAT_SECONDS) and lock() is not None:
            with contextlib.suppress(OSError):  # a file server that is away for a while
                os.utime(descriptor)
    finally:
        os.close(descriptor)


def _this_thread(save_id: str, target: Path) -> Owner:
    pid, thread = os.getpid(), threading.get_native_id()
    started = _start_of(pid, thread)
    return Owner(save_id, str(target), socket.gethostname(), _machine(), pid, thread, started, clock.wall_seconds())


def _has_ended(owner: Owner) -> bool:
    """Whether a thread of this machine has ended; false if that cannot be seen."""
    started = _start_of(owner.pid, owner.thread)
    if started:
        return started != owner.started
    try:
        os.kill(owner.pid, 0)
    except PermissionError:  # another user's, and this machine may hide those (hidepid)
        return False
    except ProcessLookupError:
        pass
    return True


def _start_of(pid: int, thread: int) -> str:
    """Start of a thread of this machine; empty if there is no such thread."""
    try:
        status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # Field 22; the name in field 2 may hold anything, up to the last bracket. A zombie (Z) has ended.
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def _make(path: Path, line: str) -> int:
    """Makes a file with one line, and returns its descriptor.

    Raises:
        FileExistsError: Something is at the path.
    """
    try:
        return _make_at_once(path, line)
    except FileExistsError:
        raise
    except OSError:  # network file systems have no files without a name: a kill may leave a lock without its line
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _append_line(descriptor, line)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _make_at_once(path: Path, line: str) -> int:
    """The same of a file that has its line before it has a name."""
    descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o644)
    try:
        _append_line(descriptor, line)
        # With a directory Python follows the link, as this one must be.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _append_line(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())
    # NFS sends what was written when any descriptor of the file is closed; until then other machines see none of it.
    os.close(os.dup(descriptor))
