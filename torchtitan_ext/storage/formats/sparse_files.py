"""Makes files with holes, and writes tensors to their places in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from torchtitan_ext import _core


def write_parts(parts: Sequence[tuple[Path, int, torch.Tensor]], *, sync: bool = False) -> None:
    """Writes contiguous tensors on the CPU at byte offsets of files, and starts their write-back.

    Args:
        sync: Whether to wait until they are on the disk.

    Raises:
        OSError: Names the file.
    """
    runs = _core.RunWriter()
    paths = dict.fromkeys(path for path, _, _ in parts)
    files = {path: runs.add_file(os.fsencode(path), path.stat().st_size) for path in paths}
    for path, offset, tensor in parts:
        runs.add_box(files[path], 1, (tensor.nbytes,), tensor.data_ptr(), (1,), offset, (1,))
    runs.write(1, True)
    runs.finish(1, sync)


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
