"""One save at a time in one place: a lock file says who saves there, and from that whether he still does.

The file is made with O_EXCL; flock is not trusted, network file systems differ in what it means. Its first line names
the owner. A lock is dead

- where its owner ran on this machine and his thread is gone, or is the one that asks: a thread is in one save at a
  time, so an earlier one of its own has failed;
- where it was not touched for ``STALE_SECONDS``: its owner touches it every ``HEARTBEAT_SECONDS``.

A dead lock is taken over. Two who take over at once, or an owner that only slept, are found by ``check``, which comes
right before the commit; until then saves do not touch each other's files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_ext.errors import SaveInProgressError

HEARTBEAT_SECONDS = 10.0

# Twelve missed beats: a process that is stopped, or a file server that hangs, for a minute is not dead.
STALE_SECONDS = 120.0

# Clocks of two machines may differ: what looks stale is watched for so long, whether it is touched after all.
_WATCH_SECONDS = 2.5 * HEARTBEAT_SECONDS

# Clocks do not differ by so much.
_VERY_OLD_SECONDS = 86_400.0

# Between making the file and writing its line lie two system calls.
_EMPTY_SECONDS = 2.0

# NFS says ESTALE of a file that another machine removes while it is opened.
_GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Owner:
    """Who saves.

    Attributes:
        path: Where.
        host: Copies of a virtual machine differ in nothing else.
        machine: Of its kernel's boot and its process ids; containers of one machine have process ids of their own.
        started: When the thread started, in ticks since the machine did; numbers of threads are used again.
        time: When the save began, seconds since 1970 by the owner's clock; for people.
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
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.time))
        return f"process {self.pid} on {self.host}, since {since}"


@dataclass(frozen=True)
class LockState:
    """What a lock file says, and when it was last touched.

    Attributes:
        owner: ``None`` while, or where, the first line is not complete.
        lines: Behind the first.
    """

    owner: Owner | None
    lines: list[str]
    inode: int
    touched: float


class SaveLock:
    """A lock that this thread holds, until ``release``. While the object lives, a thread touches the file."""

    def __init__(self, path: Path, owner: Owner, descriptor: int) -> None:
        self.path = path
        self.owner = owner
        self._descriptor = descriptor
        self._released = threading.Event()
        arguments = (os.dup(descriptor), self._released, weakref.ref(self))
        threading.Thread(target=_keep_alive, args=arguments, name="torchtitan_ext.save_lock", daemon=True).start()

    @classmethod
    def acquire(cls, path: Path, save_id: str, target: Path) -> SaveLock:
        """Takes the lock; a dead one is removed.

        Raises:
            SaveInProgressError: Another save holds it.
        """
        owner = _this_thread(save_id, target)
        while True:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                remove_dead_lock(path)
                continue
            try:
                _append_line(descriptor, json.dumps(asdict(owner)))
            except BaseException:
                os.close(descriptor)
                path.unlink()
                raise
            return cls(path, owner, descriptor)

    def add_line(self, text: str) -> None:
        """Writes another line, for those who read the file."""
        _append_line(self._descriptor, text)

    def check(self) -> None:
        """Raises SaveInProgressError where another save has taken the lock over."""
        state = read_lock(self.path)
        if state is None or state.owner != self.owner:
            raise _in_progress(self.path, self.owner.path, None if state is None else state.owner)

    def release(self) -> None:
        """Removes the file, if it is still this lock's."""
        if self._released.is_set():
            return
        self._released.set()
        inode = os.fstat(self._descriptor).st_ino
        state = read_lock(self.path)
        if state is not None and state.inode == inode:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)  # last: till then no other file has this inode


def read_lock(path: Path) -> LockState | None:
    """The state of a lock; ``None`` where there is none."""
    try:
        # A pipe that lies there would let nobody go on.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            status = os.fstat(descriptor)
            *lines, _ = stream.read().split("\n")
    except OSError as error:
        if error.errno == errno.ELOOP:
            return _link_state(path)
        if error.errno not in _GONE:
            raise
        return None
    try:
        owner = Owner(**json.loads(lines[0]))
    except (IndexError, TypeError, ValueError):
        return LockState(None, [], status.st_ino, status.st_mtime)
    return LockState(owner, lines[1:], status.st_ino, status.st_mtime)


def _link_state(path: Path) -> LockState | None:
    """Of a link at the lock's place, wherever it leads: no save has made it, so it has no owner."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return LockState(None, [], status.st_ino, status.st_mtime)


def remove_dead_lock(path: Path) -> Owner | None:
    """Removes a lock whose owner is gone, and says whose it was.

    Raises:
        SaveInProgressError: He is not.
    """
    state = read_lock(path)
    if state is None:
        return None
    if not is_dead(path, state):
        raise _in_progress(path, "" if state.owner is None else state.owner.path, state.owner)
    current = read_lock(path)
    # The number of an inode alone would not do: a new file may get that of the one that was just removed.
    if current is not None and (current.inode, current.owner) == (state.inode, state.owner):
        path.unlink(missing_ok=True)
    return state.owner


def is_dead(path: Path, state: LockState) -> bool:
    """Whether nobody saves under this lock any more. Watches it for a while before it says so of another machine's."""
    if state.owner is None:
        return _stays_untouched(path, state, _EMPTY_SECONDS)
    if is_surely_dead(state):
        return True
    # Also where it was touched in the future: one of the clocks was wrong.
    return abs(time.time() - state.touched) > STALE_SECONDS and _stays_untouched(path, state, _WATCH_SECONDS)


def is_surely_dead(state: LockState) -> bool:
    """Whether that is known without watching the lock: its owner was of this machine, or it is very old."""
    owner = state.owner
    if owner is not None and (owner.machine, owner.host) == (_machine(), socket.gethostname()):
        if (owner.pid, owner.thread) == (os.getpid(), threading.get_native_id()):
            return True
        return _has_ended(owner)
    return time.time() - state.touched > _VERY_OLD_SECONDS


def _stays_untouched(path: Path, state: LockState, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.1, seconds))
        current = read_lock(path)
        if current != state:
            return False
    return True


def _in_progress(lock: Path, path: str, owner: Owner | None) -> SaveInProgressError:
    return SaveInProgressError(path or str(lock.parent), "another process" if owner is None else str(owner), str(lock))


def _keep_alive(descriptor: int, released: threading.Event, lock: weakref.ref[SaveLock]) -> None:
    try:
        while not released.wait(HEARTBEAT_SECONDS) and lock() is not None:
            with contextlib.suppress(OSError):  # a file server that is away for a while
                os.utime(descriptor)
    finally:
        os.close(descriptor)


def _this_thread(save_id: str, target: Path) -> Owner:
    pid, thread = os.getpid(), threading.get_native_id()
    started = _start_of(pid, thread)
    return Owner(save_id, str(target), socket.gethostname(), _machine(), pid, thread, started, time.time())


def _has_ended(owner: Owner) -> bool:
    """Whether a thread of this machine has; not where that cannot be seen."""
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
    """When a thread of this machine started; empty where there is none."""
    try:
        status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # Field 22; the name in field 2 may hold anything, up to the last bracket. A zombie (Z) has ended.
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def _append_line(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())
    # NFS sends what was written when any descriptor of the file is closed; until then other machines see none of it.
    os.close(os.dup(descriptor))
