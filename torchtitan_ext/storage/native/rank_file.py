"""Writes one rank's file of a save that another process commits, from parts of tensors, without a plan or planner."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from torchtitan_ext import _core
from torchtitan_ext.storage.commit.commit import SavePlace
from torchtitan_ext.storage.native.file_writer import BLOCK_BYTES
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES


class RankFileWriter:
    """Writes records one behind the other: add them, ``write``, and ``finish`` at the end.

    Memory that was added must not change until ``write`` returns.

    Args:
        place: Where the save writes.
        sync: Wait in ``finish`` until the file is on the disk.
    """

    def __init__(self, place: SavePlace, rank: int, *, num_threads: int, sync: bool) -> None:
        self._place = place
        self._rank = rank
        self._name = place.data_name(f"__{rank}_")
        self._records = _core.RecordWriter(os.fsencode(place.directory / self._name), BLOCK_BYTES, num_threads, sync)

    def add_value(self, fqn: str, content: torch.Tensor) -> None:
        """Adds a whole record of ``torch.save``; 1-D uint8."""
        self._records.add_record((fqn, None, None), "", (), content.data_ptr(), content.numel())

    def begin_tensor(
        self, fqn: str, offsets: Sequence[int], position: int, dtype: torch.dtype, sizes: Sequence[int]
    ) -> None:
        """Begins a chunk of a tensor: call ``add_part`` with all its elements, then ``end_tensor``.

        Args:
            position: Position of the chunk in the tensor's list of chunks.
        """
        key = (fqn, tuple(offsets), position)
        self._records.begin_tensor(key, NAMES[dtype], tuple(sizes), ELEMENT_TYPES[dtype])

    def add_part(self, part: torch.Tensor) -> None:
        """Adds the next elements of the chunk in row-major order; contiguous."""
        self._records.add_bytes(part.data_ptr(), part.nbytes)

    def end_tensor(self) -> None:
        self._records.end_tensor()

    def write(self) -> None:
        """Raises OSError, which names the file, the byte and the reason."""
        self._records.write_queued()

    def finish(self) -> _core.RankFile:
        save_id = bytes.fromhex(self._place.save_id)
        return self._records.finish(self._name, save_id, self._rank)
