"""Reads boxes of a checkpoint's tensors straight from its files, in pieces that fit into a bounded buffer."""

from __future__ import annotations

import functools
import io
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.saved_chunks import SavedChunks
from torchtitan_ext.checkpoint.rules.casts import is_exact
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError, WrongValueError
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.offline.sources import FileSource, MappedFiles, read_record
from torchtitan_ext.state.host_copies import aligned
from torchtitan_ext.state.plain_value import read_value
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.native.fills import Elements, Fills, OpenFiles
from torchtitan_ext.storage.raw_tensor import DTYPES, NAMES
from torchtitan_ext.transfer.changes import HeldTensor
from torchtitan_ext.transforms.mapped_reads import mapped_elements

_Target = TypeVar("_Target")

# One call of the reader takes a batch of small pieces. Larger batches are no faster.
_MAX_BATCH_PIECES = 4096


@dataclass(frozen=True)
class Piece:
    """A box of one tensor, in elements; ``dtype`` is what its elements are read as."""

    fqn: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def chunks_of(tensors: Mapping[str, TensorStorageMetadata]) -> list[Piece]:
    """The chunks in which tensors were saved; keys are names in the source."""
    return [
        Piece(fqn, entry.properties.dtype, tuple(chunk.offsets), tuple(chunk.sizes))
        for fqn, entry in tensors.items()
        for chunk in entry.chunks
    ]


def whole(fqn: str, dtype: torch.dtype, shape: Sequence[int]) -> Piece:
    """The box that is the whole tensor."""
    return Piece(fqn, dtype, (0,) * len(shape), tuple(shape))


def held_piece(key: str, piece: Piece, shape: Sequence[int]) -> HeldTensor:
    """A box as the part of a tensor that a rank would hold, under the tensor's new name."""
    chunk = Chunk(piece.offsets, piece.sizes, (0,) * len(piece.sizes))
    return HeldTensor(key, LocalShard(piece.sizes, (chunk,)), tuple(shape), None)


def cut(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """Cuts a box into pieces of at most ``max_bytes``, in row-major order; an empty box gives no pieces."""
    if 0 not in piece.sizes:
        for offsets, sizes in _core.BoxParts(piece.offsets, piece.sizes, max_bytes // piece.dtype.itemsize):
            yield Piece(piece.fqn, piece.dtype, offsets, sizes)


def batched(
    pieces: Iterable[tuple[Piece, _Target]], max_bytes: int, *, max_count: int = _MAX_BATCH_PIECES
) -> Iterator[list[tuple[Piece, _Target]]]:
    """Groups pieces, each with the target it is for, so that a group fits into a buffer of ``max_bytes``."""
    batch: list[tuple[Piece, _Target]] = []
    num_bytes = 0
    for piece, target in pieces:
        size = aligned(piece.num_bytes)
        if batch and (num_bytes + size > max_bytes or len(batch) == max_count):
            yield batch
            batch, num_bytes = [], 0
        batch.append((piece, target))
        num_bytes += size
    if batch:
        yield batch


def views(buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """One tensor per piece, one behind the other in a buffer of bytes."""
    made = []
    begin = 0
    for piece in pieces:
        made.append(buffer[begin : begin + piece.num_bytes].view(piece.dtype).view(piece.sizes))
        begin += aligned(piece.num_bytes)
    return made


def new_buffer(num_bytes: int) -> torch.Tensor:
    """A buffer for ``batched`` and ``views``. Pages that nobody writes to take no memory.

    The buffer is mapped, so that the system gets it back at once: an allocator would keep several of them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1), flags=flags), dtype=torch.uint8)


class BoxReader:
    """Reads boxes of a source's tensors, whatever chunks they were saved in. Each thread needs a reader of its own.

    Args:
        chunks: The chunk lists that another reader of the same source has indexed already.

    Attributes:
        files: What reads the files, without the transform of a source.
    """

    def __init__(self, source: FileSource, chunks: SavedChunks | None = None) -> None:
        self.source = source
        self.files = source.source if isinstance(source, MappedFiles) else source
        self._chunks = SavedChunks() if chunks is None else chunks
        self._open = OpenFiles(self.files)
        self._fills = Fills(self._open, copy=_cast)

    def another(self) -> BoxReader:
        """A reader of the same source, for another thread."""
        return BoxReader(self.source, self._chunks)

    def chunk_list(self, entry: TensorStorageMetadata) -> _core.ChunkIndex:
        """The chunks in which a tensor of the source was saved."""
        return self._chunks.of(entry)

    def entry(self, fqn: str) -> TensorStorageMetadata:
        """The metadata of a tensor.

        Raises:
            DamagedCheckpointError: The saved chunks do not hold every element once.
        """
        entry = self._entry(fqn)
        if not self.chunk_list(entry).covers(tuple(entry.size)):
            raise DamagedCheckpointError(
                f"{self.source.path}: the chunks of {fqn} do not hold every element of its {tuple(entry.size)} once"
            )
        return entry

    def read(self, pieces: Sequence[Piece], places: Sequence[torch.Tensor]) -> None:
        """Fills each place, a contiguous tensor on the CPU, with the elements of its piece.

        Elements that were saved in another dtype are cast.

        Raises:
            DamagedCheckpointError: Bytes are not what was written.
            WrongValueError: A number is too large for the dtype of its piece.
            OSError: A file cannot be read.
        """
        with self._fills.forgotten_on_error():
            for piece, place in zip(pieces, places, strict=True):
                if isinstance(self.source, MappedFiles):
                    elements = mapped_elements(self.source.mapped, self._open, piece.fqn, piece.offsets)
                    self._fills.add(piece.fqn, place, elements)
                else:
                    self._add_parts(piece, place)
            self._fills.read()

    def read_batches(
        self, pieces: Iterable[tuple[Piece, _Target]], max_bytes: int
    ) -> Iterator[list[tuple[torch.Tensor, _Target]]]:
        """Reads pieces, each with the target it is for, as many at a time as fit into one buffer of ``max_bytes``.

        The tensors of a batch are valid until the next batch is asked for.
        """
        buffer = new_buffer(max_bytes)
        for batch in batched(pieces, max_bytes):
            read = [piece for piece, _ in batch]
            places = views(buffer, read)
            self.read(read, places)
            yield [(place, target) for place, (_, target) in zip(places, batch, strict=True)]

    def _entry(self, fqn: str) -> TensorStorageMetadata:
        entry = self.source.metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata), f"{fqn} is no tensor, please report"
        return entry

    def _add_parts(self, piece: Piece, place: torch.Tensor) -> None:
        chunks = self.chunk_list(self._entry(piece.fqn))
        parts = chunks.find_overlaps([(piece.offsets, piece.sizes, ())])
        indices = [MetadataIndex(piece.fqn, torch.Size(chunks.box(part.saved)[0])) for part in parts]
        for part, index, record in zip(parts, indices, self.files.find_records(indices), strict=True):
            target, offsets = local_view(place, part.local_offsets, part.sizes), part.saved_offsets
            if record.tensor is None:
                target.copy_(self._box_of_record(index, offsets, target))
                continue
            read_into = functools.partial(self._open.add_part, record.file, record.tensor, offsets)
            dtype = DTYPES[record.tensor.dtype]  # as ``records_of`` has checked
            self._fills.add(piece.fqn, target, Elements((dtype,), read_into))

    def _box_of_record(self, index: MetadataIndex, offsets: tuple[int, ...], place: torch.Tensor) -> torch.Tensor:
        """The box of a record that is no plain memory (a subclass, quantised, sparse), as dense values."""
        try:
            value = read_value(io.BytesIO(read_record(self.files, index).numpy().data), weights_only=True)
        except ValueError as error:
            raise CheckpointReadError(index.fqn, str(error)) from None
        return local_view(dense_values(value), offsets, place.shape)


def _cast(fqn: str, place: torch.Tensor, values: torch.Tensor) -> None:
    """``copy`` of ``Fills``: refuses numbers that become infinite."""
    place.copy_(values)
    if is_exact(values.dtype, place.dtype):
        return
    is_lost = _is_finite(values) & ~_is_finite(place)
    if is_lost.any():
        number = values[is_lost][0].item()
        raise WrongValueError(
            f"{fqn} has the number {number}, which {place.dtype} cannot hold; leave the tensor out, or "
            "choose a dtype with larger numbers, such as bfloat16",
            "dtype",
        )


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()


def records_of(source: FileSource, chunks: Sequence[Piece]) -> list[Record]:
    """The record of each chunk.

    Raises:
        DamagedCheckpointError: A record has another dtype or shape than the metadata says.
    """
    records = source.find_records([MetadataIndex(chunk.fqn, torch.Size(chunk.offsets)) for chunk in chunks])
    for chunk, record in zip(chunks, records, strict=True):
        dtype = NAMES.get(chunk.dtype, str(chunk.dtype))
        defect = None if record.tensor is None else record.tensor.shape_defect(dtype, chunk.sizes)
        if defect is not None:
            raise DamagedCheckpointError(f"{source.path}: {chunk.fqn} in {record.file} {defect}")
    return records
