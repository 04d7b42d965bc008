"""Whose lock is dead: other threads, users, machines and clocks; and when other machines see what a lock says."""

import errno
import gc
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.commit import save_lock
from torchtitan_ext.storage.commit.save_lock import (
    LockState,
    SaveLock,
    is_dead,
    is_surely_dead,
    read_lock,
    remove_dead_lock,
)


def just_now(folder: Path) -> float:
    """As the file system says it."""
    (folder / "just now").touch()
    touched = (folder / "just now").stat().st_mtime
    (folder / "just now").unlink()
    return touched


@pytest.fixture
def living(tmp_path: Path) -> Iterator[LockState]:
    """What a lock of another thread of this process says."""
    owners: list[save_lock.Owner] = []
    ready, done = threading.Event(), threading.Event()

    def run() -> None:
        owners.append(save_lock._this_thread("1" * 32, Path("/run/step-1")))
        ready.set()
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    yield LockState(owners[0], [], 1, just_now(tmp_path))
    done.set()
    thread.join()


def test_a_living_thread_is_not_dead_whatever_the_clock_says(living: LockState) -> None:
    assert not is_surely_dead(replace(living, touched=0.0))


@pytest.mark.parametrize("field", ["started", "thread", "pid"])
def test_a_thread_that_is_gone_is_dead(living: LockState, field: str) -> None:
    """Numbers of threads and processes are used again; then they started at another time."""
    assert living.owner is not None
    changed: dict[str, Any] = {field: "1" if field == "started" else 2**22 + 1}
    assert is_surely_dead(replace(living, owner=replace(living.owner, **changed)))


def test_this_thread_is_in_one_save_at_a_time(tmp_path: Path) -> None:
    owner = save_lock._this_thread("1" * 32, Path("/run/step-1"))
    assert is_surely_dead(LockState(owner, [], 1, just_now(tmp_path)))


@pytest.mark.parametrize("field", ["machine", "host"])
def test_containers_and_copies_of_machines_are_others(living: LockState, field: str) -> None:
    """Process 1 of another container, or of a copied machine with the same boot, is not process 1 here."""
    assert living.owner is not None
    changed: dict[str, Any] = {field: "another", "pid": 1, "thread": 1, "started": "1"}
    assert not is_surely_dead(replace(living, owner=replace(living.owner, **changed)))


def test_processes_of_other_users_may_be_hidden(living: LockState, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signal: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(save_lock, "_start_of", lambda pid, thread: "")
    monkeypatch.setattr(save_lock.os, "kill", kill)
    assert not is_surely_dead(living)


def test_a_lock_from_the_future_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "_WATCH_SECONDS", 0.2)
    path = tmp_path / "lock"
    lock = SaveLock.acquire(path, "1" * 32, tmp_path)
    lock_line = path.read_text().replace(save_lock._machine(), "another boot")
    lock.release()
    path.write_text(lock_line)
    os.utime(path, (0, just_now(tmp_path) + 3600))
    state = read_lock(path)
    assert state is not None and is_dead(path, state)


def test_the_lock_of_who_took_over_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file may have the inode of the dead one."""
    path = tmp_path / "lock"
    dead = SaveLock.acquire(path, "1" * 32, tmp_path)
    original = save_lock.is_dead

    def is_dead_and_taken(lock_path: Path, state: LockState) -> bool:
        result = original(lock_path, state)
        path.write_text(path.read_text().replace("1" * 32, "2" * 32))
        return result

    monkeypatch.setattr(save_lock, "is_dead", is_dead_and_taken)
    remove_dead_lock(path)
    state = read_lock(path)
    assert state is not None and state.owner is not None and state.owner.save_id == "2" * 32
    dead.release()
    left = read_lock(path)
    assert left is not None and left.owner == state.owner


def test_other_machines_see_each_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS sends what was written when a descriptor of the file is closed; a lock is open for as long as a save."""
    calls: list[str] = []
    original_write, original_close = os.write, os.close

    def write(descriptor: int, data: bytes) -> int:
        calls.append(f"write {os.fstat(descriptor).st_ino}")
        return original_write(descriptor, data)

    def close(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():  # not the thread of an earlier lock
            calls.append(f"close {os.fstat(descriptor).st_ino}")
        original_close(descriptor)

    monkeypatch.setattr(save_lock.os, "write", write)
    monkeypatch.setattr(save_lock.os, "close", close)
    lock = SaveLock.acquire(tmp_path / "lock", "1" * 32, tmp_path)
    lock.add_line("{}")
    inode = os.stat(tmp_path / "lock").st_ino
    assert [call for call in calls if call.endswith(f" {inode}")] == [f"write {inode}", f"close {inode}"] * 2
    monkeypatch.undo()
    lock.release()


@pytest.mark.parametrize("are_nameless_files_known", [True, False])
def test_a_lock_has_its_owner_before_it_has_a_name_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_nameless_files_known: bool
) -> None:
    """Else a kill would leave a lock of which nobody knows that it is dead."""
    original_open, original_append = os.open, save_lock._append_line
    names: list[list[str]] = []

    def open_as_on_nfs(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return original_open(path, flags, *mode)

    def append(descriptor: int, text: str) -> None:
        names.append(os.listdir(tmp_path))
        original_append(descriptor, text)

    if not are_nameless_files_known:
        monkeypatch.setattr(save_lock.os, "open", open_as_on_nfs)
    monkeypatch.setattr(save_lock, "_append_line", append)
    lock = SaveLock.acquire(tmp_path / "lock", "1" * 32, tmp_path)
    assert names == [[] if are_nameless_files_known else ["lock"]]
    with pytest.raises(FileExistsError):
        save_lock._make(tmp_path / "lock", "{}")
    state = read_lock(tmp_path / "lock")
    assert state is not None and state.owner == lock.owner
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_goes_while_it_is_opened_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "open", stale)
    assert read_lock(tmp_path / "lock") is None


@pytest.mark.parametrize("kind", ["dangling link", "link to a file", "pipe"])
def test_what_no_save_has_put_at_the_place_of_a_lock_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(save_lock, "_EMPTY_SECONDS", 0.2)
    path, other = tmp_path / "lock", tmp_path / "other"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(other)
    if kind == "link to a file":
        other.write_text("theirs")
    lock = SaveLock.acquire(path, "1" * 32, tmp_path)
    state = read_lock(path)
    assert state is not None and state.owner == lock.owner and not path.is_symlink()
    lock.release()
    assert os.listdir(tmp_path) == (["other"] if kind == "link to a file" else [])
    assert kind != "link to a file" or other.read_text() == "theirs"


def test_bytes_that_are_no_text_are_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "_EMPTY_SECONDS", 0.2)
    path = tmp_path / "lock"
    path.write_bytes(b"\xff\xfe\x00\n\xff")
    lock = SaveLock.acquire(path, "1" * 32, tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_file_server_that_is_away_does_not_end_the_touching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT_SECONDS", 0.02)
    failures: list[int] = []
    again = threading.Event()

    def utime(descriptor: int) -> None:
        if len(failures) < 2:
            failures.append(descriptor)
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        again.set()

    monkeypatch.setattr(save_lock.os, "utime", utime)
    lock = SaveLock.acquire(tmp_path / "lock", "1" * 32, tmp_path)
    again.wait()
    lock.release()


def test_another_machine_holds_the_lock_while_it_touches_it(living: LockState, tmp_path: Path) -> None:
    assert living.owner is not None
    path = tmp_path / "lock"
    lock = SaveLock.acquire(path, "1" * 32, tmp_path)
    path.write_text(path.read_text().replace(save_lock._machine(), "another boot"))
    with pytest.raises(SaveInProgressError, match="process"):
        remove_dead_lock(path)
    lock.release()


class InterruptAt:
    """Raises KeyboardInterrupt before one line of a lock's code, as a signal does."""

    def __init__(self, number: int) -> None:
        self.lines_left = number

    def __call__(self, frame: FrameType, event: str, value: object) -> Any:
        code = frame.f_code
        return self.before_line if code.co_filename == save_lock.__file__ and code.co_name != "__del__" else None

    def before_line(self, frame: FrameType, event: str, value: object) -> Any:
        self.lines_left -= event == "line"
        if self.lines_left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.before_line


def hold(path: Path) -> None:
    lock = None
    try:
        lock = SaveLock.acquire(path, "1" * 32, path.parent)
        lock.add_line("{}")
        lock.release()
    finally:
        if lock is not None:
            lock.release()  # as a save that has failed does


def test_no_interrupt_leaves_a_lock_of_a_thread_that_lives_on(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Saves by other threads, and by other processes, would be refused until this one ends."""
    path, before, number = tmp_path / "lock", sys.gettrace(), 0
    gc.freeze()  # each collection looks at what the lock has left, not at all of torch
    request.addfinalizer(gc.unfreeze)
    while True:
        number += 1
        interrupt = InterruptAt(number)
        sys.settrace(interrupt)
        try:
            hold(path)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupt.lines_left > 0:
            break
        gc.collect()
        assert os.listdir(tmp_path) == [], number
    assert number > 50


def test_an_interrupt_while_its_thread_begins_leaves_no_lock(tmp_path: Path) -> None:
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with mock.patch.object(threading.Thread, "start", start_and_interrupt), pytest.raises(KeyboardInterrupt):
        hold(tmp_path / "lock")
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_lock_without_its_thread_is_none(tmp_path: Path) -> None:
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
        pytest.raises(RuntimeError, match="can't start new thread; raise the number of threads .*ulimit -u"),
    ):
        SaveLock.acquire(tmp_path / "lock", "1" * 32, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_fork_does_not_take_the_lock_of_its_parent_along(tmp_path: Path) -> None:
    lock = SaveLock.acquire(tmp_path / "lock", "1" * 32, tmp_path)
    child = os.fork()
    if child == 0:
        del lock
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lock.check()
    del lock
    gc.collect()
    assert os.listdir(tmp_path) == []
