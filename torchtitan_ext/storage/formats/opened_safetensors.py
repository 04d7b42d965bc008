"""A safetensors file that stays open: its bytes and boxes of its tensors, read into memory of the caller."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry, read_header_and_notes
from torchtitan_ext.storage.raw_tensor import dtype_name


class OpenedSafetensors:
    """Reads are of the file that was opened, whatever lies at its path by then. The file may have been written over
    meanwhile, or cut: what is read is to be compared with what was noted of it.

    Attributes:
        entries, notes: As ``read_header_and_notes``.

    Raises:
        DamagedCheckpointError: The header is damaged; or, of a read, the file has been cut.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The open of a pipe would wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        self.entries, self.notes = read_header_and_notes(path, self._descriptor)

    def read(self, ranges: Sequence[SafetensorsEntry]) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each tensor, or of a part of one."""
        with self._reads() as (runs, file):
            for one in ranges:
                runs.check_bytes(file, one.begin, one.num_bytes)  # before memory is asked for
            found = [np.empty(one.num_bytes, dtype=np.uint8) for one in ranges]
            for one, content in zip(ranges, found, strict=True):
                runs.add_bytes(file, one.begin, one.num_bytes, content.ctypes.data)
        return found

    def read_box(
        self, begin: int, sizes: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], box: Sequence[int]
    ) -> torch.Tensor:
        """A box of a tensor of these sizes, whose row-major elements begin at byte ``begin``."""
        place = torch.empty(tuple(box), dtype=dtype, device="cpu")
        with self._reads() as (runs, file):
            stored = _core.StoredTensor(dtype_name(dtype), sizes, None, begin)
            runs.add_box(file, stored, offsets, place.shape, place.data_ptr(), place.stride())
        return place

    @contextmanager
    def _reads(self) -> Iterator[tuple[_core.RunReader, int]]:
        """Takes what is to be read, as the file of a number; it is read at the end of the ``with``."""
        runs = _core.RunReader()
        try:
            yield runs, runs.add_file(str(self.path), -1, self._descriptor)
            runs.read(1, "none")
        except (_core.FormatError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENODATA:
                raise
            raise DamagedCheckpointError(f"{self.path} was cut after it was opened ({error})") from None
