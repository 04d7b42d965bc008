"""What a checkpoint holds, as DCP's metadata has it."""

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

from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.metadata.saved_state import SavedState, SavedTensor


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
