"""The files of a checkpoint that are read together. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import Record

# A process may have 1,024 files open.
_MAX_OPEN_FILES = 128


class Chunk(Protocol):
    """A chunk of a tensor, or a value: a ``MetadataIndex`` of DCP, or a ``ChunkKey``."""

    @property
    def fqn(self) -> str: ...

    @property
    def offset(self) -> Sequence[int] | None: ...


class HostTensor(Protocol):
    """A tensor on the CPU."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def data_ptr(self) -> int: ...

    def stride(self) -> Sequence[int]: ...


class RecordFiles(Protocol):
    """What reads the files of a checkpoint: a ``FileReader``, or another source of ``offline``."""

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        """Where chunks lie."""
        ...

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        """Adds a file to a RunReader, and returns its number there."""
        ...

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        """Reads what was added."""
        ...


class OpenFiles:
    """The files of a checkpoint that are read together. They stay open from one read to the next: opening a file again
    reads the checksums of all its blocks again.

    Attributes:
        source: Reads them.
        lost: Of boxes of ``add_box`` of which a finite number has become infinite by a cast, one such number, by their
            labels.
    """

    def __init__(self, source: RecordFiles) -> None:
        self.source = source
        self.lost: dict[str, float] = {}
        self.close()

    def add_box(
        self,
        name: str,
        stored: _core.StoredTensor,
        offsets: Sequence[int],
        sizes: Sequence[int],
        address: int,
        strides: Sequence[int],
        dtype: str = "",
        label: str = "",
    ) -> None:
        """Adds a box of a stored tensor, and the memory that it goes to, of its dtype or another one to which elements
        are cast: no two of its elements share any.

        Raises:
            FormatError: The tensor has another number of dims, or the box does not lie in it, or it not in the file.
        """
        file = self._number_of(name)  # which may begin new runs
        number = self._runs.add_box(file, stored, offsets, sizes, address, strides, dtype)
        if dtype and dtype != stored.dtype:
            self._casts[number] = label

    def add_part(
        self,
        name: str,
        stored: _core.StoredTensor,
        begin: Sequence[int],
        inside: Sequence[int],
        place: HostTensor,
    ) -> None:
        """Adds a box of a stored tensor whose offsets are given as two summands, and the CPU tensor that it fills."""
        offsets = [first + offset for first, offset in zip(begin, inside, strict=True)]
        dtype = str(place.dtype).removeprefix("torch.")
        self.add_box(name, stored, offsets, place.shape, place.data_ptr(), place.stride(), dtype)

    def add_list(
        self,
        name: str,
        reads: _core.ReadList,
        file: int,
        first: int,
        max_bytes: int,
        targets: dict[str, Any],
    ) -> _core.AddedRows:
        """Adds rows of a file of a list, with the targets that can be filled straight."""
        number = self._number_of(name)  # which may begin new runs
        return reads.add(self._runs, number, file, first, max_bytes, targets)

    def add_bytes(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Adds bytes of a file. Returns the memory that they go to."""
        file = self._number_of(name)
        self._runs.check_bytes(file, offset, num_bytes)  # before memory is asked for
        content = np.empty(num_bytes, dtype=np.uint8)
        self._runs.add_bytes(file, offset, num_bytes, content.ctypes.data)
        return content

    def read(self) -> None:
        """Reads what was added; after an error nothing of it is left.

        Raises:
            DamagedCheckpointError: Bytes are not what was written.
        """
        with self.forgotten_on_error():
            self.source.read_runs(self._runs, list(self._numbers))
            self.lost |= {self._casts[box]: number for box, number in self._runs.lost() if box in self._casts}
            self._casts.clear()

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """The next call must not read what failed. Damage gets the error that callers know."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, (_core.FormatError, UnicodeDecodeError)):
                raise DamagedCheckpointError(str(error)) from None
            raise

    def close(self) -> None:
        """Forgets the files, and what was added and not read."""
        self._runs = _core.RunReader()
        self._numbers: dict[str, int] = {}
        self._casts: dict[int, str] = {}

    def _number_of(self, name: str) -> int:
        """The number of a file; where too many are open, what was added is read first, and they close."""
        if name not in self._numbers:
            if len(self._numbers) >= _MAX_OPEN_FILES:
                self.read()
                self.close()
            self._numbers[name] = self.source.open_file(self._runs, name)
        return self._numbers[name]


def read_record(source: RecordFiles, key: Chunk) -> npt.NDArray[np.uint8]:
    """The bytes of a whole record, as ``torch.save`` wrote it."""
    (record,) = source.find_records([key])
    files = OpenFiles(source)
    with files.forgotten_on_error():
        content = files.add_bytes(record.file, record.offset, record.num_bytes)
        files.read()
    return content
