"""DCP's ``.metadata``, read without running it.

The file is a pickle, and unpickling runs what it names. ``csrc/core/metadata_pickle.h`` reads it as data, by an
allow-list; here the columns become the objects that DCP knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core

_MEMORY_FORMATS = {
    _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value: torch.contiguous_format,
    _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value: torch.channels_last,
    _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value: torch.preserve_format,
}


def parse_metadata(data: bytes) -> Metadata:
    """The metadata that a ``.metadata`` file holds, equal to what ``pickle.loads`` would make of it.

    Args:
        data: The bytes of the file, of torch 2.1 to 2.13.

    Raises:
        ValueError: The bytes are damaged, or name what is not part of a checkpoint's metadata. Nothing was run.
    """
    columns = _core.read_metadata_pickle(data)
    chunk_lists = [
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        for chunks in columns["chunk_lists"]
    ]
    storage_meta = columns["storage_meta"]
    metadata = Metadata(
        {fqn: _entry(values, chunk_lists) for fqn, values in columns["keys"]},
        planner_data=columns["planner_data"],
        storage_data=dict(map(_part, columns["parts"])),
        storage_meta=None if storage_meta is None else _storage_meta(storage_meta),
    )
    metadata.version = columns["version"]
    return metadata


def _entry(
    values: tuple[Any, ...] | None, chunk_lists: list[list[ChunkStorageMetadata]]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if values is None:
        return BytesStorageMetadata()
    sizes, dtype, layout, memory_format, requires_grad, pin_memory, chunk_list = values
    properties = TensorProperties(
        dtype=getattr(torch, dtype),
        layout=torch.serialization._get_layout(layout),
        requires_grad=requires_grad,
        memory_format=_MEMORY_FORMATS[memory_format],
        pin_memory=pin_memory,
    )
    return TensorStorageMetadata(properties=properties, size=torch.Size(sizes), chunks=chunk_lists[chunk_list])


def _part(values: tuple[Any, ...]) -> tuple[MetadataIndex, _StorageInfo]:
    fqn, offsets, index, path, offset_bytes, length_bytes, transforms = values
    place = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets), index)
    if transforms:
        return place, _StorageInfo(path, offset_bytes, length_bytes, transforms)
    return place, _StorageInfo(path, offset_bytes, length_bytes)


def _storage_meta(fields: dict[str, Any]) -> StorageMeta:
    checkpoint_id = fields.get("checkpoint_id")
    if isinstance(checkpoint_id, tuple):  # the parts of a path
        checkpoint_id = Path(*checkpoint_id)
    return StorageMeta(checkpoint_id, fields.get("save_id"), fields.get("load_id"), list(fields.get("modules") or ()))
