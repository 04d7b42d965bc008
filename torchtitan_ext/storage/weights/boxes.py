"""Writes elements of tensors to their places in files, from where they lie, or through buffers of bounded size."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torchtitan_ext import _core
from torchtitan_ext.state.host_copies import row_major_boxes
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry
from torchtitan_ext.storage.native.device_buckets import OutgoingBuckets, bucket_bytes_of
from torchtitan_ext.storage.weights.placed import Placed, row_major_strides

# What is queued is written after so many bytes: copies, which a planner or a cast has made, are freed then. The two
# buckets of an accelerator have as many together.
_BATCH_BYTES = 64 << 20

# Of one copy that a cast makes.
_CAST_BYTES = 16 << 20

# A process may have 1,024 files open.
_MAX_OPEN_FILES = 200


class PlacedBoxes:
    """Queues elements, and keeps their memory alive until they are written. At the end of a ``with`` without an error
    the rest is written, and all is on the disk.

    Args:
        num_bytes: Of what will be added, about.
        advance: Called with each number of written bytes.
        sync: Whether to wait for the disk.

    Attributes:
        num_bytes: What was written, in bytes.
    """

    def __init__(self, num_threads: int, num_bytes: int, advance: Callable[[int], object], *, sync: bool) -> None:
        self._num_threads = num_threads
        self._advance = advance
        self._sync = sync
        self._bucket_bytes = min(bucket_bytes_of(num_bytes), _BATCH_BYTES // 2)
        self._runs = _core.RunWriter()
        self._files: dict[Path, int] = {}
        self._held: list[torch.Tensor] = []
        self._held_bytes = 0
        self._buckets: OutgoingBuckets | None = None
        self.num_bytes = 0

    def __enter__(self) -> PlacedBoxes:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self.write()
                self._runs.finish(self._num_threads, self._sync)
        finally:
            # The buckets know this object: without the garbage collector nothing else would free them.
            self._buckets = None
            self._held.clear()

    def add(self, placed: Placed, path: Path, entry: SafetensorsEntry) -> None:
        """Queues elements.

        Args:
            entry: The tensor of the file, and where it lies there.
        """
        values, item_bytes = placed.values, ITEM_BYTES[entry.dtype]
        begin = entry.begin + placed.position * item_bytes
        if not placed.dtypes:
            self._add_plain(path, begin, placed.strides, values)
            return
        widest = max(dtype.itemsize for dtype in placed.dtypes)
        for inside, part in row_major_boxes(values, max(1, _CAST_BYTES // widest)):
            cast = functools.reduce(torch.Tensor.to, placed.dtypes, part)
            self._add_plain(path, begin + _steps(inside, placed.strides) * item_bytes, placed.strides, cast)

    def write(self) -> None:
        """Writes all that was added."""
        if self._buckets is not None:
            self._buckets.finish()
        self._write_queued()

    def _add_plain(self, path: Path, begin: int, strides: Sequence[int], values: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        if values.is_cpu:
            self._add_memory(
                path, begin, strides, values.shape, values.element_size(), values.stride(), values.data_ptr()
            )
            self._held.append(values)
            self._held_bytes += values.nbytes
            if self._held_bytes >= _BATCH_BYTES:
                self._write_queued()
            return
        if self._buckets is None:
            self._buckets = OutgoingBuckets(self._bucket_bytes, self._write_queued)
        item_bytes = values.element_size()
        for inside, part in row_major_boxes(values, self._bucket_bytes // item_bytes):
            at = begin + _steps(inside, strides) * item_bytes
            packed = row_major_strides(part.shape)
            self._buckets.add(
                part, functools.partial(self._add_packed, path, at, strides, part.shape, item_bytes, packed)
            )

    def _add_packed(
        self,
        path: Path,
        begin: int,
        strides: Sequence[int],
        sizes: torch.Size,
        item_bytes: int,
        packed: Sequence[int],
        address: int,
        num_bytes: int,
    ) -> None:
        self._add_memory(path, begin, strides, sizes, item_bytes, packed, address)

    def _add_memory(
        self,
        path: Path,
        begin: int,
        file_strides: Sequence[int],
        sizes: Sequence[int],
        item_bytes: int,
        strides: Sequence[int],
        address: int,
    ) -> None:
        self._runs.add_box(self._file(path), item_bytes, sizes, address, strides, begin, file_strides)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self._write_queued()
                self._runs.finish(self._num_threads, self._sync)
                self._files = {}
            self._files[path] = self._runs.add_file(os.fsencode(path), path.stat().st_size)
        return self._files[path]

    def _write_queued(self) -> None:
        num_bytes = self._runs.queued_bytes
        self._runs.write(self._num_threads, self._sync)
        self._held.clear()
        self._held_bytes = 0
        self.num_bytes += num_bytes
        self._advance(num_bytes)


def _steps(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
