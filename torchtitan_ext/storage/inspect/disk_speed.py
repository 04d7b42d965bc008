"""Measures how fast the disk of a directory writes and reads, with a temporary file. Imports no torch."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_BLOCK_BYTES = 4 << 20


def disk_speed(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes per second of a write with its sync, and of a read with an empty page cache if the system allows that.

    Raises:
        OSError: The directory cannot be written to, or is full.
    """
    block = os.urandom(_BLOCK_BYTES)
    num_blocks = max(1, num_bytes // _BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
        begin = time.perf_counter()
        for _ in range(num_blocks):
            stream.write(block)
        os.fsync(stream.fileno())
        written = time.perf_counter()
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        stream.seek(0)
        reading = time.perf_counter()
        while stream.read(_BLOCK_BYTES):
            pass
        read = time.perf_counter()
    num_bytes = num_blocks * _BLOCK_BYTES
    return num_bytes / (written - begin), num_bytes / (read - reading)
