"""Writes elements of tensors to their places in files, from where they lie, or through buffers of bounded size."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torchtitan_ext import _core
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.state.host_copies import row_major_boxes
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry
from torchtitan_ext.storage.native.device_buckets import OutgoingBuckets, bucket_bytes_of
from torchtitan_ext.storage.weights.one_writer import OneWriterPerFile
from torchtitan_ext.storage.weights.placed import FilePart

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
        paths: All files.
        one_writer: How others' files get what this rank has, where each file has one writer. Collective then: each rank
            uses one of these in the same ``with``.

    Attributes:
        num_bytes: What was written, in bytes.
    """

    def __init__(
        self,
        num_threads: int,
        num_bytes: int,
        advance: Callable[[int], object],
        *,
        sync: bool,
        paths: Sequence[Path],
        one_writer: OneWriterPerFile | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._advance = advance
        self._sync = sync
        self._one_writer = one_writer
        self._max_queued = _BATCH_BYTES if one_writer is None else one_writer.max_queued_bytes
        self._bucket_bytes = min(bucket_bytes_of(num_bytes), self._max_queued // 2)
        self._runs = _core.RunWriter()
        self._files: dict[Path, int] = {}
        for number, path in enumerate(paths if one_writer is not None else ()):
            self._add_file(path, is_written=one_writer is not None and one_writer.writes(number))
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
                while not self._write_queued(is_last=True):
                    pass
                self._runs.finish(self._num_threads, self._sync)
        finally:
            # The buckets know this object: without the garbage collector nothing else would free them.
            self._buckets = None
            self._held.clear()

    def add(self, part: FilePart, values: torch.Tensor, path: Path, entry: SafetensorsEntry) -> None:
        """Queues the elements of a part.

        Args:
            entry: The tensor of the file, and where it lies there.
        """
        item_bytes = ITEM_BYTES[entry.dtype]
        begin = entry.begin + part.position * item_bytes
        if not part.dtypes:
            self._add_plain(path, begin, part.strides, values)
            return
        widest = max(dtype.itemsize for dtype in part.dtypes)
        for inside, box in row_major_boxes(values, max(1, _CAST_BYTES // widest)):
            cast = functools.reduce(torch.Tensor.to, part.dtypes, box)
            self._add_plain(path, begin + steps(inside, part.strides) * item_bytes, part.strides, cast)

    def write(self) -> None:
        """Writes all that was added."""
        if self._buckets is not None:
            self._buckets.finish()
        self._write_queued()

    def _add_plain(self, path: Path, begin: int, strides: Sequence[int], values: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        if values.is_cpu:
            self._add_of_host(path, begin, strides, values)
            return
        if self._buckets is None:
            self._buckets = OutgoingBuckets(self._bucket_bytes, self._write_queued)
        item_bytes = values.element_size()
        for inside, part in row_major_boxes(values, self._bucket_bytes // item_bytes):
            at = begin + steps(inside, strides) * item_bytes
            packed = row_major_strides(part.shape)
            self._buckets.add(
                part, functools.partial(self._add_memory, path, at, strides, part.shape, item_bytes, packed)
            )

    def _add_of_host(self, path: Path, begin: int, strides: Sequence[int], values: torch.Tensor) -> None:
        item_bytes = values.element_size()
        # Of a round that others take part in no rank gets more than it has room for.
        max_elements = values.numel() if self._one_writer is None else max(1, self._max_queued // item_bytes)
        for inside, part in row_major_boxes(values, max_elements):
            at = begin + steps(inside, strides) * item_bytes
            self._add_memory(path, at, strides, part.shape, item_bytes, part.stride(), part.data_ptr())
            self._held.append(part)
            self._held_bytes += part.nbytes
            if self._held_bytes >= self._max_queued:
                self._write_queued()

    def _add_memory(
        self,
        path: Path,
        begin: int,
        file_strides: Sequence[int],
        sizes: Sequence[int],
        item_bytes: int,
        strides: Sequence[int],
        address: int,
        num_bytes: int = 0,
    ) -> None:
        """``num_bytes``: what buckets tell beside the address."""
        self._runs.add_box(self._file(path), item_bytes, sizes, address, strides, begin, file_strides)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self._write_queued()
                self._runs.finish(self._num_threads, self._sync)
                self._files = {}
            self._add_file(path, is_written=True)
        return self._files[path]

    def _add_file(self, path: Path, *, is_written: bool) -> None:
        self._files[path] = self._runs.add_file(os.fsencode(path), path.stat().st_size, is_written)

    def _write_queued(self, *, is_last: bool = False) -> bool:
        """Whether no rank has more to write, as far as this one has to wait for that."""
        num_bytes = self._runs.queued_bytes
        is_over = True
        if self._one_writer is None:
            self._runs.write(self._num_threads, self._sync)
        else:
            is_over = self._one_writer.round(
                self._runs, self._num_threads, starts_write_back=self._sync, is_last=is_last
            )
        self._held.clear()
        self._held_bytes = 0
        self.num_bytes += num_bytes
        self._advance(num_bytes)
        return is_over


def steps(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
