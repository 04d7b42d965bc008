"""What a checkpoint holds, and DCP's metadata of it: each made of the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.metadata.lazy_metadata import columns_behind
from torchtitan_ext.storage.metadata.saved_state import SavedState, SavedTensor, state_in
from torchtitan_ext.storage.raw_tensor import dtype_name


class SavedChunks:
    """Finds the chunk list of each tensor, sorted once, the same object for equal lists, which many keys have.

    Our saves share the lists themselves, which pickle keeps; for those of stock the contents are compared.
    """

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[list[ChunkStorageMetadata], _core.ChunkIndex]] = {}
        self._by_content: dict[bytes, _core.ChunkIndex] = {}
        self._by_number: dict[int, _core.ChunkIndex] = {}

    def find(self, metadata: Metadata, fqn: str) -> _core.ChunkIndex | None:
        """The chunk list of a key of a metadata, always the same one; ``None`` where it is no tensor."""
        columns = columns_behind(metadata.state_dict_metadata)
        if columns is None:
            saved = metadata.state_dict_metadata.get(fqn)
            return self.of(saved) if isinstance(saved, TensorStorageMetadata) else None
        number = columns.list_of(fqn)
        if number is not None and number not in self._by_number:
            self._by_number[number] = columns.chunk_index(number)
        return None if number is None else self._by_number[number]

    def of(self, saved: TensorStorageMetadata) -> _core.ChunkIndex:
        known = self._by_identity.get(id(saved.chunks))
        if known is None:
            index = _core.ChunkIndex(saved.chunks)
            # The list is kept alive, so that no other list gets its id.
            known = (saved.chunks, self._by_content.setdefault(index.to_bytes(), index))
            self._by_identity[id(saved.chunks)] = known
        return known[1]


def state_of(metadata: Metadata) -> SavedState:
    """What DCP's metadata describes."""
    columns = columns_behind(metadata.state_dict_metadata)
    if columns is not None:
        return state_in(columns, metadata.planner_data)
    chunks = SavedChunks()
    entries = {
        fqn: SavedTensor(dtype_name(saved.properties.dtype), tuple(saved.size), chunks.of(saved))
        if isinstance(saved, TensorStorageMetadata)
        else None
        for fqn, saved in metadata.state_dict_metadata.items()
    }
    return SavedState(entries, metadata.planner_data)


def metadata_of_state(state: SavedState) -> Metadata:
    """DCP's metadata of a checkpoint, without the places of its records."""
    lists: dict[int, list[ChunkStorageMetadata]] = {}  # equal lists stay one

    def entry_of(saved: SavedTensor) -> TensorStorageMetadata:
        chunks = lists.setdefault(id(saved.chunks), [])
        if not chunks:
            chunks += [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in saved.chunks.boxes()]
        return TensorStorageMetadata(TensorProperties(getattr(torch, saved.dtype)), torch.Size(saved.shape), chunks)

    entries = {
        fqn: BytesStorageMetadata() if saved is None else entry_of(saved) for fqn, saved in state.entries.items()
    }
    return Metadata(entries, planner_data=state.planner_data)


def places_of(records: Mapping[tuple[str, tuple[int, ...]], Record]) -> dict[MetadataIndex, StorageInfo]:
    """``Metadata.storage_data`` of tensors, whose records are given by key and offsets of the chunk."""
    return {
        MetadataIndex(fqn, torch.Size(offsets)): StorageInfo(record.file, record.offset, record.num_bytes)
        for (fqn, offsets), record in records.items()
    }
