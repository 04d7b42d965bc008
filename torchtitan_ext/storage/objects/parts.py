"""The file of a rank on its way into an object: records, packed and hashed into parts that the store takes."""

from __future__ import annotations

import numpy as np

from torchtitan_ext import _core
from torchtitan_ext.storage.objects.folder import ObjectFolder

_MAX_PARTS = 10_000
"""More parts no store takes of one object."""

_LEAST_PART_BYTES = 64 << 20
_PARTS_AT_A_TIME = 2

# Of records that are packed and handed over at a time.
_PACKED_BYTES = 8 << 20


class ObjectParts:
    """Writes what a RecordWriter has queued to an object: one put if it is small, else parts of 64 MiB or more.

    Takes memory for three parts. A failure leaves the object absent, or with a part of its bytes; its key belongs to
    this save alone.

    Args:
        records: Writes to memory.
        num_bytes: About how many bytes the object will have.
    """

    def __init__(self, folder: ObjectFolder, name: str, records: _core.RecordWriter, num_bytes: int) -> None:
        self._records = records
        self._folder = folder
        self._name = name
        part_bytes = max(_LEAST_PART_BYTES, 2 * num_bytes // _MAX_PARTS)
        self._parts = folder.open_parts(name, part_bytes, _PARTS_AT_A_TIME)

    def write_queued(self) -> None:
        while True:
            # New memory each time: the writer of parts does not copy it, and frees it when the store has it.
            packed = np.empty(_PACKED_BYTES, dtype=np.uint8)
            num_bytes = self._records.write_part(packed.ctypes.data, packed.nbytes)
            if num_bytes == 0:
                return
            self._write(packed[:num_bytes])

    def finish(self, save_id: str, rank: int) -> _core.RankFile:
        """Writes the footer, and waits until the store has all."""
        file = self._records.finish(self._name, bytes.fromhex(save_id), rank)
        self._write(self._records.rest)
        with self._folder.told(self._name):
            self._parts.close()
        return file

    def _write(self, content: bytes | np.ndarray) -> None:
        with self._folder.told(self._name):
            self._parts.write(content)

    def abandon(self) -> None:
        """Ends an upload that has failed. Parts that no object is made of could not be listed, and stay for ever."""
        try:
            self._parts.close()
        except Exception:
            pass
