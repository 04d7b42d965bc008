"""Files that have places for the bytes of tensors, filled by several processes, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_ext.layout.layout import row_major_position
from torchtitan_ext.offline.boxes import BoxReader, Piece, batched, cut, new_buffer, views
from torchtitan_ext.offline.workers import Shares, run_tasks
from torchtitan_ext.storage.formats.sparse_files import write_parts
from torchtitan_ext.storage.progress import OnBytes

# A task is large enough that its start does not count, and small enough that processes end together.
_TASK_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorPlace:
    """Where the bytes of a tensor go, row-major: ``offset`` of a file, in bytes. ``fqn`` is its name in the source,
    ``dtype`` that of the file."""

    fqn: str
    dtype: torch.dtype
    path: Path
    offset: int


@dataclass(frozen=True)
class _Part:
    """A part of a tensor, small enough to be held."""

    path: Path
    offset: int
    piece: Piece

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes


def fill_files(reader: BoxReader, targets: Sequence[TensorPlace], shares: Shares, progress: OnBytes) -> None:
    """Writes tensors of a reader's source into files that are there already.

    Raises:
        DamagedCheckpointError: Bytes of the source are not what was written.
        OSError: A file cannot be read or written.
    """
    reader.source.thread_count = shares.num_threads
    parts: list[_Part] = []
    for place in targets:
        entry = reader.entry(place.fqn)
        shape = tuple(entry.size)
        whole = Piece(place.fqn, place.dtype, (0,) * len(shape), shape)
        parts += [
            _Part(place.path, place.offset + row_major_position(piece.offsets, shape) * piece.dtype.itemsize, piece)
            for piece in cut(whole, shares.part_bytes)
        ]
    tasks = list(batched(parts, _TASK_BYTES, max_count=len(parts)))

    def fill(number: int, report: OnBytes) -> None:
        buffer = new_buffer(shares.part_bytes)
        for batch in batched(tasks[number], shares.part_bytes):
            pieces = [part.piece for part in batch]
            places = views(buffer, pieces)
            reader.read(pieces, places)
            write_parts([(part.path, part.offset, place) for part, place in zip(batch, places, strict=True)])
            report(sum(part.num_bytes for part in batch))

    run_tasks(fill, len(tasks), shares.num_processes, progress)
