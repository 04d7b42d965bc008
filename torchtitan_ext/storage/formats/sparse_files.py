"""Makes files with holes, and writes tensors to their places in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import torch

from torchtitan_ext import _core
from torchtitan_ext.layout.dtensor import as_bytes

# The system writes smaller tensors back by itself: a call for each would take longer than the disk.
_WRITE_BACK_BYTES = 1 << 20


def write_parts(parts: Sequence[tuple[Path, int, torch.Tensor]]) -> None:
    """Writes contiguous tensors on the CPU at byte offsets of files, and starts their write-back.

    Raises:
        OSError: Names the file.
    """
    for path, members in groupby(parts, key=lambda part: part[0]):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for _, offset, tensor in members:
                _write(descriptor, offset, tensor)
                if tensor.nbytes >= _WRITE_BACK_BYTES:
                    _core.start_write_back(descriptor, offset, tensor.nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(descriptor)


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


def _write(descriptor: int, offset: int, tensor: torch.Tensor) -> None:
    rest = as_bytes(tensor).numpy().data
    while rest:
        num_bytes = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[num_bytes:], offset + num_bytes
