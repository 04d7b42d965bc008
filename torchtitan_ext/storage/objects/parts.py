"""Files on their way into objects, in parts that the store takes."""

from __future__ import annotations

import numpy as np

from torchtitan_ext import _core
from torchtitan_ext.storage.objects.folder import ObjectFolder

_MAX_PARTS = 10_000
"""More parts no store takes of one object."""

# What is on its way at a time: as many bytes as a load has, in as many requests. A part is hashed before its first byte
# is sent, and few large parts come to their ends together, so that nothing is sent while the next ones are hashed.
_LEAST_PART_BYTES = 16 << 20
_BYTES_AT_A_TIME = 128 << 20
_LEAST_PARTS_AT_A_TIME = 2


class RecordParts:
    """Writes what a RecordWriter, which writes to memory, has queued, as one object: one put if it is small, else parts
    of 16 MiB or more.

    Takes memory for the parts on their way, 128 MiB, and for one more, which is filled meanwhile. A failure leaves the
    object absent, or with a part of its bytes; its key belongs to this save alone.

    Args:
        num_bytes: About how many bytes the object will have.
    """

    def __init__(self, folder: ObjectFolder, name: str, records: _core.RecordWriter, num_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._records = records
        self._part_bytes = max(_LEAST_PART_BYTES, 2 * num_bytes // _MAX_PARTS)
        max_parts = max(_LEAST_PARTS_AT_A_TIME, _BYTES_AT_A_TIME // self._part_bytes)
        self._parts = folder.open_parts(name, self._part_bytes, max_parts)

    def write_queued(self) -> None:
        while True:
            packed = np.empty(self._part_bytes, dtype=np.uint8)
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

    def abandon(self) -> None:
        """Ends an upload that has failed. Parts that no object is made of could not be listed, and stay for ever."""
        try:
            self._parts.close()
        except Exception:
            pass

    def _write(self, content: bytes | np.ndarray) -> None:
        """Takes over the memory: it is not copied, and freed when the store has it."""
        with self._folder.told(self._name):
            self._parts.write(content)
