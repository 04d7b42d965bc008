"""Boxes of a source's tensors: where they lie by metadata and files, and how they are read in bounded pieces."""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.saved_metadata import ChunkList, SavedChunks
from torchtitan_ext.checkpoint.planners.targets import is_exact
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError, WrongValueError
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.offline.sources import Source, read_record
from torchtitan_ext.state.plain_value import read_value
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.damage import shape_defect
from torchtitan_ext.storage.native.read_batch import Copy, add_box
from torchtitan_ext.storage.raw_tensor import DTYPES, NAMES

# A batch of small pieces is one call of the reader; more of them at a time save nothing.
_MAX_BATCH_PIECES = 4096

# Files stay open from one call to the next: to open one again is to read the checksums of all its blocks again.
_MAX_OPEN_FILES = 128

_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, small enough to be held."""

    fqn: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Part:
    """What a saved chunk has of a piece: where it begins in the chunk, and its place in memory."""

    index: MetadataIndex
    offsets: tuple[int, ...]
    place: torch.Tensor


def chunks_of(tensors: Mapping[str, TensorStorageMetadata]) -> list[Piece]:
    """The chunks that tensors were saved in, by the names in the source."""
    return [
        Piece(fqn, entry.properties.dtype, tuple(chunk.offsets), tuple(chunk.sizes))
        for fqn, entry in tensors.items()
        for chunk in entry.chunks
    ]


def cut(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """A box in pieces of at most so many bytes, one behind the other in row-major order. Nothing of an empty one."""
    if 0 in piece.sizes:
        return
    if piece.num_bytes <= max_bytes or not piece.sizes:
        yield piece
        return
    (first, *other_offsets), (num_rows, *row) = piece.offsets, piece.sizes
    row_bytes = piece.num_bytes // num_rows
    step = max(1, max_bytes // row_bytes)
    for begin in range(0, num_rows, step):
        offsets = (first + begin, *other_offsets)
        rows = Piece(piece.fqn, piece.dtype, offsets, (min(step, num_rows - begin), *row))
        if row_bytes <= max_bytes:
            yield rows
        else:
            inner = Piece(piece.fqn, piece.dtype, tuple(other_offsets), tuple(row))
            for part in cut(inner, max_bytes):
                yield Piece(piece.fqn, piece.dtype, (offsets[0], *part.offsets), (1, *part.sizes))


class Sized(Protocol):
    """What takes so many bytes."""

    @property
    def num_bytes(self) -> int: ...


_Sized = TypeVar("_Sized", bound=Sized)


def batched(pieces: Iterable[_Sized], max_bytes: int, *, max_count: int = _MAX_BATCH_PIECES) -> Iterator[list[_Sized]]:
    """Pieces in groups that fit into a buffer of so many bytes."""
    batch: list[_Sized] = []
    num_bytes = 0
    for piece in pieces:
        size = _padded(piece.num_bytes)
        if batch and (num_bytes + size > max_bytes or len(batch) == max_count):
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += size
    if batch:
        yield batch


def views(buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Tensors for pieces, one behind the other in a buffer of bytes."""
    made = []
    begin = 0
    for piece in pieces:
        made.append(buffer[begin : begin + piece.num_bytes].view(piece.dtype).view(piece.sizes))
        begin += _padded(piece.num_bytes)
    return made


def new_buffer(num_bytes: int) -> torch.Tensor:
    """For ``batched`` and ``views`` of so many bytes. Pages that nobody writes to take no memory.

    Mapped, so that it is given back at once: what an allocator keeps of several buffers would add up.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(_padded(num_bytes), _ALIGNMENT), flags=flags), dtype=torch.uint8)


class BoxReader:
    """Reads boxes of a source's tensors, whatever chunks these were saved in. Each thread has one of its own.

    Args:
        chunks: Those that another reader of the source knows.
    """

    def __init__(self, source: Source, chunks: SavedChunks | None = None) -> None:
        self.source = source
        self._chunks = SavedChunks() if chunks is None else chunks
        self._close()

    def another(self) -> BoxReader:
        """A reader of the same source, for another thread."""
        return BoxReader(self.source, self._chunks)

    def chunk_list(self, entry: TensorStorageMetadata) -> ChunkList:
        """How a tensor of the source was saved."""
        return self._chunks.of(entry)

    def entry(self, fqn: str) -> TensorStorageMetadata:
        """What the source says of a tensor.

        Raises:
            DamagedCheckpointError: The saved chunks do not hold every element once.
        """
        entry = self.source.metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata), f"{fqn} is no tensor, please report"
        if not self.chunk_list(entry).covers(tuple(entry.size)):
            raise DamagedCheckpointError(
                f"{self.source.path}: the chunks of {fqn} do not hold every element of its {tuple(entry.size)} once"
            )
        return entry

    def read(self, pieces: Sequence[Piece], places: Sequence[torch.Tensor]) -> None:
        """Fills each place, a contiguous tensor on the CPU, with the elements of its piece.

        Where the piece is of another dtype than the tensor, elements are cast, by way of memory of their own.

        Raises:
            DamagedCheckpointError: Bytes are not what was written.
            WrongValueError: A number is too large for the dtype of its piece.
            OSError: A file cannot be read.
        """
        parts = [part for piece, place in zip(pieces, places, strict=True) for part in self._parts_of(piece, place)]
        records = self.source.find_records([part.index for part in parts])
        runs, files = self._runs, self._files
        later: list[Copy] = []
        casts: list[tuple[_Part, torch.Tensor]] = []
        try:
            for part, record in zip(parts, records, strict=True):
                if record.tensor is None:
                    later.append((part.place, self._box_of_record(part)))
                    continue
                if record.file not in files:
                    files[record.file] = self.source.open_file(runs, record.file)
                saved = self._saved_dtype(part, record)
                place = (
                    part.place
                    if saved == part.place.dtype
                    else torch.empty(part.place.shape, dtype=saved, device="cpu")
                )
                later += add_box(runs, files[record.file], record.tensor, part.offsets, place)
                if place is not part.place:
                    casts.append((part, place))
            self.source.read_runs(runs, list(files))
        except BaseException as error:
            self._close()  # what was added is not to be read by another call
            if isinstance(error, (_core.FormatError, UnicodeDecodeError)):
                raise DamagedCheckpointError(str(error)) from None
            raise
        if len(files) > _MAX_OPEN_FILES:
            self._close()
        for place, values in later:
            place.copy_(values)
        for part, values in casts:
            _cast(part, values)

    def _close(self) -> None:
        self._runs = _core.RunReader()
        self._files: dict[str, int] = {}

    def _parts_of(self, piece: Piece, place: torch.Tensor) -> list[_Part]:
        entry = self.source.metadata.state_dict_metadata[piece.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = self.chunk_list(entry)
        wanted = [(piece.offsets, piece.sizes, (0,) * len(piece.sizes))]
        parts = []
        for _, chunk, saved_offsets, local_offsets, sizes in chunks.index.find_overlaps(wanted):
            index = MetadataIndex(piece.fqn, torch.Size(chunks.index.box(chunk)[0]))
            parts.append(_Part(index, saved_offsets, local_view(place, local_offsets, sizes)))
        return parts

    def _saved_dtype(self, part: _Part, record: Record) -> torch.dtype:
        entry = self.source.metadata.state_dict_metadata[part.index.fqn]
        assert isinstance(entry, TensorStorageMetadata) and record.tensor is not None
        dtype = entry.properties.dtype
        if DTYPES[record.tensor.dtype] != dtype:
            raise DamagedCheckpointError(
                f"{record.file}: {part.index.fqn} lies there as {record.tensor.dtype}, the metadata says {dtype}"
            )
        return dtype

    def _box_of_record(self, part: _Part) -> torch.Tensor:
        """Of a tensor that is not plain memory: the values that it stands for."""
        try:
            value = read_value(io.BytesIO(read_record(self.source, part.index).numpy().data), weights_only=True)
        except ValueError as error:
            raise CheckpointReadError(part.index.fqn, str(error)) from None
        return local_view(dense_values(value), part.offsets, part.place.shape)


def _cast(part: _Part, values: torch.Tensor) -> None:
    part.place.copy_(values)
    if is_exact(values.dtype, part.place.dtype):
        return
    is_lost = _is_finite(values) & ~_is_finite(part.place)
    if is_lost.any():
        number = values[is_lost][0].item()
        raise WrongValueError(
            f"{part.index.fqn} has the number {number}, which {part.place.dtype} cannot hold; leave the tensor out, or "
            "choose a dtype with larger numbers, such as bfloat16",
            "dtype",
        )


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()


def _padded(num_bytes: int) -> int:
    return (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def records_of(source: Source, chunks: Sequence[Piece]) -> list[Record]:
    """Where whole chunks lie, as they were saved.

    Raises:
        DamagedCheckpointError: What lies there is of another dtype or shape than the metadata says.
    """
    records = source.find_records([MetadataIndex(chunk.fqn, torch.Size(chunk.offsets)) for chunk in chunks])
    for chunk, record in zip(chunks, records, strict=True):
        dtype = NAMES.get(chunk.dtype, str(chunk.dtype))
        defect = None if record.tensor is None else shape_defect(record.tensor, dtype, chunk.sizes)
        if defect is not None:
            raise DamagedCheckpointError(f"{source.path}: {chunk.fqn} in {record.file} {defect}")
    return records
