"""Makes files with holes, and writes bytes to their places in them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_ext import _core


def write_parts(parts: Sequence[tuple[Path, int, int, int]]) -> None:
    """Writes memory to files, and starts their write-back.

    Args:
        parts: Each a file, the byte at which it is written there, an address, and a number of bytes.

    Raises:
        OSError: Names the file.
    """
    runs = _core.RunWriter()
    paths = dict.fromkeys(path for path, *_ in parts)
    files = {path: runs.add_file(os.fsencode(path), path.stat().st_size) for path in paths}
    for path, offset, address, num_bytes in parts:
        runs.add_box(files[path], 1, (num_bytes,), address, (1,), offset, (1,))
    runs.write(1, True)
    runs.finish(1, False)


def make_file(path: Path, head: bytes, num_bytes: int) -> None:
    """Makes a file of ``num_bytes`` that begins with ``head``; the rest is a hole.

    Raises:
        OSError: Names the file.
    """
    try:
        with path.open("xb") as file:
            file.write(head)
            file.truncate(num_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_files(paths: Iterable[Path]) -> None:
    """Waits until files are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
