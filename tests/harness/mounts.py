"""Mounts that only one thread of a process sees, and the threads that it starts: read-only, small, or in the way.

Permissions do not stop root, and a disk that is full is full for all tests: a mount namespace has disks of its own.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


@cache
def why_forbidden() -> str:
    """Why this machine allows no mounts of one's own; empty where it does."""
    reasons = [""]

    def try_it() -> None:
        try:
            with own_mounts():
                mount_disk(Path("/tmp"), "4k")
        except OSError as error:
            reasons.append(f"a mount namespace of one's own: {error}")

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return reasons[-1]


def namespace() -> str:
    """The file of this thread's mounts, by which another process can enter them."""
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/mnt"


@contextmanager
def own_mounts(like: str | None = None) -> Iterator[None]:
    """Mounts of this thread alone until the end of the ``with``; ``like``: those of another process to begin with."""
    before, folder = os.open(namespace(), os.O_RDONLY), os.getcwd()
    try:
        if like is not None:
            _enter(like)
        _check(_libc.unshare(CLONE_NEWNS), "unshare")
        _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "/")
        yield
    finally:
        _enter(f"/proc/self/fd/{before}")
        os.close(before)
        os.chdir(folder)


def mount_disk(path: Path, size: str, flags: int = 0) -> None:
    """An empty disk in memory over a directory."""
    _check(_libc.mount(b"tmpfs", bytes(path), b"tmpfs", flags, f"size={size}".encode()), str(path))


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    _check(_libc.mount(bytes(path), bytes(path), None, MS_BIND, None), str(path))
    _check(_libc.mount(None, bytes(path), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None), str(path))
    try:
        yield
    finally:
        _check(_libc.umount2(bytes(path), 0), str(path))


@contextmanager
def lost(path: Path) -> Iterator[None]:
    """Another disk, empty, is where the directory was."""
    mount_disk(path, "1m")
    try:
        yield
    finally:
        _check(_libc.umount2(bytes(path), 0), str(path))


def _enter(mounts: str) -> None:
    descriptor = os.open(mounts, os.O_RDONLY)
    try:
        # Threads that this one has started share its working directory, which setns does not allow.
        _check(_libc.unshare(CLONE_FS), "unshare")
        _check(_libc.setns(descriptor, CLONE_NEWNS), "setns")
    finally:
        os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
