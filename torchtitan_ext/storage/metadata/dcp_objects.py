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


def saved_chunks(metadata: Metadata) -> _core.SavedChunks:
    """The chunk lists of a metadata's tensors, each sorted once."""
    columns = columns_behind(metadata.state_dict_metadata)
    if columns is not None:
        return _core.SavedChunks(columns)
    return _core.SavedChunks(metadata.state_dict_metadata, TensorStorageMetadata)


def state_of(metadata: Metadata) -> SavedState:
    """What DCP's metadata describes."""
    columns = columns_behind(metadata.state_dict_metadata)
    if columns is not None:
        return state_in(columns, metadata.planner_data)
    chunks = saved_chunks(metadata)
    entries = {
        fqn: SavedTensor(dtype_name(saved.properties.dtype), tuple(saved.size), chunks.of(saved.chunks))
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
