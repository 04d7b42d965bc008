"""Reads boxes of a checkpoint's tensors straight from its files, in pieces that fit into a bounded buffer.

Imports torch only for what the native reader cannot read into place.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, WrongValueError
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.offline.sources import DcpSource, FileSource
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.element_types import item_bytes_of
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.metadata.saved_state import ChunkKey, SavedTensor
from torchtitan_ext.storage.native.open_files import OpenFiles

Memory = npt.NDArray[np.uint8]
"""Bytes of the host, one behind the other."""

# One call of the reader takes a batch of small parts. Larger batches are no faster.
_MAX_BATCH_PARTS = 4096


@dataclass(frozen=True)
class Piece:
    """A box of one tensor, in elements; ``dtype`` is what its elements are read as."""

    fqn: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


ReadPart = tuple[Piece, Memory, _core.BoxPart]
"""A part of one of several boxes: as a box of its tensor, the memory of its elements, and where it stands."""


def chunks_of(tensors: Mapping[str, SavedTensor]) -> list[Piece]:
    """The chunks in which tensors were saved; keys are names in the source."""
    return [Piece(fqn, entry.dtype, *box) for fqn, entry in tensors.items() for box in entry.chunks.boxes()]


def whole(fqn: str, entry: SavedTensor) -> Piece:
    """The box that is the whole tensor."""
    return Piece(fqn, entry.dtype, (0,) * len(entry.shape), entry.shape)


def batches_of(boxes: Sequence[Piece], max_bytes: int, *, max_parts: int = _MAX_BATCH_PARTS) -> _core.BoxBatches:
    """Cuts boxes into parts of at most ``max_bytes``, row-major, and groups these for a buffer of that size."""
    sized = [(box.offsets, box.sizes, item_bytes_of(box.dtype)) for box in boxes]
    return _core.BoxBatches(sized, max_bytes, max_parts)


def piece_of(boxes: Sequence[Piece], part: _core.BoxPart) -> Piece:
    """A part of one of the boxes as a box of its tensor."""
    return Piece(boxes[part.box].fqn, boxes[part.box].dtype, part.offsets, part.sizes)


def new_buffer(num_bytes: int) -> Memory:
    """A buffer for ``batches_of``. Pages that nobody writes to take no memory.

    The buffer is mapped, so that the system gets it back at once: an allocator would keep several of them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1), flags=flags), dtype=np.uint8)


class BoxReader:
    """Reads boxes of a source's tensors, whatever chunks they were saved in. Each thread needs a reader of its own.

    Attributes:
        files: What reads the files, without the transform of a source.
    """

    def __init__(self, source: FileSource) -> None:
        self.source = source
        self.files = source if isinstance(source, (DcpSource, PlainFiles)) else source.source
        self._open = OpenFiles(self.files)
        self._others: Any = None

    def entry(self, fqn: str) -> SavedTensor:
        """What the source says of a tensor.

        Raises:
            DamagedCheckpointError: The saved chunks do not hold every element once.
        """
        entry = self._entry(fqn)
        if not entry.chunks.covers(entry.shape):
            raise DamagedCheckpointError(
                f"{self.source.path}: the chunks of {fqn} do not hold every element of its {entry.shape} once"
            )
        return entry

    def read(self, pieces: Sequence[Piece], places: Sequence[Memory]) -> None:
        """Fills the memory of each piece with its elements, row by row.

        Elements that were saved in another dtype are cast.

        Raises:
            DamagedCheckpointError: Bytes are not what was written.
            WrongValueError: A number is too large for the dtype of its piece.
            OSError: A file cannot be read.
        """
        try:
            with self._open.forgotten_on_error():
                self._open.lost.clear()
                for piece, place in zip(pieces, places, strict=True):
                    if self.files is self.source:
                        self._add_parts(piece, place)
                    else:
                        self._by_torch().add_mapped(self.source, piece, place)
                (self._others or self._open).read()
        except BaseException:
            self._others = None  # the next call must not fill what was added
            raise
        for fqn, number in self._open.lost.items():
            raise too_large(fqn, number, next(piece.dtype for piece in pieces if piece.fqn == fqn))

    def read_parts(self, boxes: Sequence[Piece], parts: Sequence[_core.BoxPart], buffer: Memory) -> list[ReadPart]:
        """Reads a batch of ``batches_of`` into the buffer."""
        pieces = [piece_of(boxes, part) for part in parts]
        places = [buffer[part.begin : part.begin + part.num_bytes] for part in parts]
        self.read(pieces, places)
        return list(zip(pieces, places, parts, strict=True))

    def read_batches(self, boxes: Sequence[Piece], max_bytes: int) -> Iterator[list[ReadPart]]:
        """Reads boxes in parts, as many at a time as fit into one buffer of ``max_bytes``.

        The memory of a batch is valid until the next batch is asked for.
        """
        buffer = new_buffer(max_bytes)
        for parts in batches_of(boxes, max_bytes):
            yield self.read_parts(boxes, parts, buffer)

    def _by_torch(self) -> Any:
        """Reads what needs torch: a ``TorchBoxes``, made when it is first needed."""
        if self._others is None:
            self._others = importlib.import_module("torchtitan_ext.offline.torch_boxes").TorchBoxes(self._open)
        return self._others

    def _entry(self, fqn: str) -> SavedTensor:
        entry = self.source.state.entries[fqn]
        assert entry is not None, f"{fqn} is no tensor, please report"
        return entry

    def _add_parts(self, piece: Piece, place: Memory) -> None:
        chunks = self._entry(piece.fqn).chunks
        parts = chunks.find_overlaps([(piece.offsets, piece.sizes, ())])
        keys = [ChunkKey(piece.fqn, chunks.box(part.saved)[0]) for part in parts]
        strides = row_major_strides(piece.sizes)
        for part, key, record in zip(parts, keys, self.files.find_records(keys), strict=True):
            stored = record.tensor
            if stored is None or not (stored.dtype == piece.dtype or _core.has_cast(stored.dtype, piece.dtype)):
                self._by_torch().add(piece, place, part, key, record)
                continue
            first = sum(map(mul, part.local_offsets, strides))
            address = place.ctypes.data + first * item_bytes_of(piece.dtype)
            offsets, sizes = part.saved_offsets, part.sizes
            self._open.add_box(record.file, stored, offsets, sizes, address, strides, piece.dtype, piece.fqn)


def records_of(source: FileSource, chunks: Sequence[Piece]) -> list[Record]:
    """The record of each chunk.

    Raises:
        DamagedCheckpointError: A record has another dtype or shape than the metadata says.
    """
    records = source.find_records([ChunkKey(chunk.fqn, chunk.offsets) for chunk in chunks])
    for chunk, record in zip(chunks, records, strict=True):
        defect = None if record.tensor is None else record.tensor.shape_defect(chunk.dtype, chunk.sizes)
        if defect is not None:
            raise DamagedCheckpointError(f"{source.path}: {chunk.fqn} in {record.file} {defect}")
    return records


def too_large(fqn: str, number: float, dtype: str) -> WrongValueError:
    """The refusal of a cast that would make a number infinite."""
    return WrongValueError(
        f"{fqn} has the number {number}, which {dtype} cannot hold; leave the tensor out, or choose a dtype with "
        "larger numbers, such as bfloat16",
        "dtype",
    )
