"""What files cost by system calls alone: the limit that checkpoints are measured against. A file per process.

All of them take the number of threads: each has its own part of the tensors, one after the other in the file.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

MAX_PIECES = 1024  # IOV_MAX
DIRECT_BYTES = 8 << 20
PAGE_BYTES = 4096
_SYNC_FILE_RANGE_WRITE = 2

Bytes = np.ndarray


def bytes_of(tensors: dict[str, torch.Tensor]) -> list[Bytes]:
    return [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in tensors.values()]


def write(path: Path, parts: Sequence[Bytes], *, sync: bool, num_threads: int, write_back: bool = False) -> None:
    """By pwritev; with `write_back` the disk is told to begin after each call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write_group(group: Sequence[Bytes], offset: int) -> None:
        for first in range(0, len(group), MAX_PIECES):
            begin = offset
            offset = transfer(os.pwritev, descriptor, group[first : first + MAX_PIECES], offset)
            if write_back:
                _start_write_back(descriptor, begin, offset - begin)

    # A call per tensor where write-back begins on the way: else there would be one call, and nothing to begin before.
    _in_threads(write_group, parts, num_threads, max_parts=1 if write_back else None)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def read(path: Path, parts: Sequence[Bytes], *, num_threads: int) -> None:
    """By preadv, into place."""
    descriptor = os.open(path, os.O_RDONLY)

    def read_group(group: Sequence[Bytes], offset: int) -> None:
        for first in range(0, len(group), MAX_PIECES):
            offset = transfer(os.preadv, descriptor, group[first : first + MAX_PIECES], offset)

    _in_threads(read_group, parts, num_threads)
    os.close(descriptor)


def read_direct(path: Path, parts: Sequence[Bytes], *, num_threads: int) -> None:
    """Past the page cache (O_DIRECT), through an aligned buffer per thread."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read_group(group: Sequence[Bytes], offset: int) -> None:
        buffer = np.frombuffer(mmap.mmap(-1, DIRECT_BYTES), dtype=np.uint8)
        begin = end = 0  # the bytes of the file that lie in the buffer
        for part in group:
            done = 0
            while done < part.nbytes:
                if not begin <= offset < end:
                    begin = offset - offset % PAGE_BYTES
                    end = begin + os.preadv(descriptor, [memoryview(buffer)], begin)
                count = min(end - offset, part.nbytes - done)
                part[done : done + count] = buffer[offset - begin : offset - begin + count]
                done += count
                offset += count

    _in_threads(read_group, parts, num_threads)
    os.close(descriptor)


def read_columns(sources: Sequence[Path], columns: dict[str, torch.Tensor], rank: int) -> None:
    """A rank's columns from every rank's rows, a call per run."""
    for source, path in enumerate(sources):
        descriptor = os.open(path, os.O_RDONLY)
        base = 0
        for tensor in columns.values():
            local = tensor.view(torch.uint8).numpy()
            num_rows, run_bytes = local.shape[0] // len(sources), local.shape[1]
            for row in range(num_rows):
                run = memoryview(local[source * num_rows + row])
                os.preadv(descriptor, [run], base + (row * len(sources) + rank) * run_bytes)
            base += num_rows * len(sources) * run_bytes
        os.close(descriptor)


def read_columns_by_rows(sources: Sequence[Path], columns: dict[str, torch.Tensor], rank: int) -> None:
    """The same by a call per tensor and file: all of its rows, of which the wanted part is copied."""
    for source, path in enumerate(sources):
        descriptor = os.open(path, os.O_RDONLY)
        base = 0
        buffer = np.empty(0, dtype=np.uint8)
        for tensor in columns.values():
            local = tensor.view(torch.uint8).numpy()
            num_rows, run_bytes = local.shape[0] // len(sources), local.shape[1]
            num_bytes = num_rows * len(sources) * run_bytes
            if buffer.nbytes < num_bytes:
                buffer = np.empty(num_bytes, dtype=np.uint8)
            os.preadv(descriptor, [memoryview(buffer[:num_bytes])], base)
            rows = buffer[:num_bytes].reshape(num_rows, len(sources) * run_bytes)
            local[source * num_rows : (source + 1) * num_rows] = rows[:, rank * run_bytes : (rank + 1) * run_bytes]
            base += num_bytes
        os.close(descriptor)


def sync_files(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Takes synced files out of the page cache, so that the next read goes to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_of(folder: Path, rank: int, world_size: int) -> list[Path]:
    """This rank's share of all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())[rank::world_size]


def transfer(call: Callable[..., int], descriptor: int, parts: Sequence[Bytes], offset: int) -> int:
    pieces = [memoryview(part) for part in parts]
    while pieces:
        done = call(descriptor, pieces, offset)
        assert done > 0
        offset += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if pieces and done:
            pieces[0] = pieces[0][done:]
    return offset


def _in_threads(
    work: Callable[[Sequence[Bytes], int], None],
    parts: Sequence[Bytes],
    num_threads: int,
    max_parts: int | None = None,
) -> None:
    """Calls work(parts, offset in the file) for groups of neighbours, as many as there are threads or more."""
    per_group = -(-len(parts) // num_threads) if max_parts is None else max_parts
    offsets = np.cumsum([0, *(part.nbytes for part in parts)])
    firsts = range(0, len(parts), per_group)
    if num_threads == 1:
        for first in firsts:
            work(parts[first : first + per_group], int(offsets[first]))
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda first: work(parts[first : first + per_group], int(offsets[first])), firsts))


def _start_write_back(descriptor: int, offset: int, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)
