"""Boxes of tensors that only torch can read: cast, through a transform, of records that are no plain memory."""

from __future__ import annotations

import functools
import io

import torch

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.rules.casts import is_exact
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.offline.boxes import Memory, Piece, too_large
from torchtitan_ext.offline.mapped_files import MappedFiles
from torchtitan_ext.state.plain_value import read_value
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.metadata.saved_state import ChunkKey
from torchtitan_ext.storage.native.fills import Elements, Fills
from torchtitan_ext.storage.native.open_files import OpenFiles, read_record
from torchtitan_ext.storage.raw_tensor import DTYPES, dtype_name
from torchtitan_ext.transforms.mapped_reads import mapped_elements


def tensor_of(place: Memory, piece: Piece) -> torch.Tensor:
    """The elements of a piece, without a copy."""
    return torch.from_numpy(place).view(getattr(torch, piece.dtype)).view(piece.sizes)


class TorchBoxes:
    """Fills memory by torch, for a ``BoxReader`` whose files it reads."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._fills = Fills(files, copy=_cast)

    def add(self, piece: Piece, place: Memory, part: _core.Overlap, key: ChunkKey, record: Record) -> None:
        """Adds the part of a piece that a chunk has."""
        target = local_view(tensor_of(place, piece), part.local_offsets, part.sizes)
        if record.tensor is None:
            target.copy_(self._box_of_record(key, part.saved_offsets, target))
            return
        read_into = functools.partial(self._files.add_part, record.file, record.tensor, part.saved_offsets)
        self._fills.add(piece.fqn, target, Elements((DTYPES[record.tensor.dtype],), read_into))

    def add_mapped(self, source: MappedFiles, piece: Piece, place: Memory) -> None:
        """Adds a piece of a tensor that a transform makes."""
        elements = mapped_elements(source.mapped, self._files, piece.fqn, piece.offsets)
        self._fills.add(piece.fqn, tensor_of(place, piece), elements)

    def read(self) -> None:
        self._fills.read()

    def _box_of_record(self, key: ChunkKey, offsets: tuple[int, ...], place: torch.Tensor) -> torch.Tensor:
        """The box of a record that is no plain memory (a subclass, quantised, sparse), as dense values."""
        try:
            value = read_value(io.BytesIO(read_record(self._files.source, key).data), weights_only=True)
        except ValueError as error:
            raise CheckpointReadError(key.fqn, str(error)) from None
        return local_view(dense_values(value), offsets, place.shape)


def _cast(fqn: str, place: torch.Tensor, values: torch.Tensor) -> None:
    """``copy`` of ``Fills``: refuses numbers that become infinite."""
    place.copy_(values)
    if is_exact(values.dtype, place.dtype):
        return
    is_lost = _is_finite(values) & ~_is_finite(place)
    if is_lost.any():
        raise too_large(fqn, values[is_lost][0].item(), dtype_name(place.dtype))


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()
