"""DCP's ``.metadata``, written without an object per part, and read without running it.

The file is a pickle, and unpickling runs what it names. ``csrc/core/metadata_pickle.h`` reads it as data, by an
allow-list, into columns; the objects that DCP knows are made of them when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import shown
from torchtitan_ext.storage.lazy_metadata import lazy_entries, lazy_parts
from torchtitan_ext.storage.raw_tensor import dtype_name
from torchtitan_ext.storage.saved_metadata import columns_of_tables

_ENCODED_MEMORY_FORMATS = {
    torch.contiguous_format: _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value,
    torch.channels_last: _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value,
    torch.preserve_format: _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value,
}


def parse_metadata(data: bytes) -> Metadata:
    """The metadata that a ``.metadata`` file holds, equal to what ``pickle.loads`` would make of it.

    Its mappings are lazy. Keys whose chunk lists are equal share one list.

    Args:
        data: The bytes of the file, of torch 2.1 to 2.13.

    Raises:
        ValueError: The bytes are damaged, or name what is not part of a checkpoint's metadata. Nothing was run.
    """
    return _lazy_metadata(*_core.read_metadata_pickle(data))


def parse_index_metadata(content: bytes, path: Path) -> Metadata:
    """The metadata that an index holds in its tables.

    Raises:
        FormatError: The index is damaged, or belongs to a checkpoint with a ``.metadata``.
    """
    _, _, _, _, files, tables = _core.parse_index(content, shown(path))
    return metadata_of_tables(tables, files, path)


def metadata_of_tables(tables: bytes, files: Sequence[tuple[str, int, int, int, int, bytes]], path: Path) -> Metadata:
    """The same of an index that was read.

    Args:
        files: Rows of ``_core.parse_index``.
    """
    return _lazy_metadata(*columns_of_tables(tables, files, path))


def columns_of(state_dict_metadata: Mapping[str, Any]) -> _core.MetadataColumns | None:
    """The entries of a metadata as columns; ``None`` where some are not DCP's own."""
    columns = _core.MetadataColumns()
    lists: dict[int, int | None] = {}
    for fqn, entry in state_dict_metadata.items():
        if type(fqn) is not str:
            return None
        if type(entry) is BytesStorageMetadata:
            columns.add_bytes_key(fqn)
            continue
        if type(entry) is not TensorStorageMetadata or type(entry.chunks) is not list:
            return None
        if id(entry.chunks) not in lists:
            lists[id(entry.chunks)] = columns.add_chunk_list(entry.chunks, ChunkStorageMetadata, torch.Size)
        chunk_list, properties = lists[id(entry.chunks)], entry.properties
        if chunk_list is None or type(entry.size) is not torch.Size or type(properties) is not TensorProperties:
            return None
        flags = (properties.requires_grad, properties.pin_memory)
        if not all(type(flag) is bool for flag in flags):
            return None
        columns.add_tensor_key(
            fqn,
            entry.size,
            dtype_name(properties.dtype),
            str(properties.layout),
            _ENCODED_MEMORY_FORMATS[properties.memory_format],
            *flags,
            chunk_list,
        )
    return columns


def storage_meta_fields(meta: StorageMeta) -> dict[str, Any]:
    """The fields as plain values: a path as a tuple of its text."""
    fields = dict(vars(meta))
    if isinstance(meta.checkpoint_id, PurePath):
        fields["checkpoint_id"] = (os.fspath(meta.checkpoint_id),)
    return fields


def _lazy_metadata(
    columns: _core.MetadataColumns, planner_data: Any, storage_meta: dict[str, Any] | None, version: str | None
) -> Metadata:
    metadata = Metadata(
        lazy_entries(columns),
        planner_data=planner_data,
        storage_data=lazy_parts(columns),
        storage_meta=None if storage_meta is None else _storage_meta(storage_meta),
    )
    metadata.version = version
    return metadata


def _storage_meta(fields: dict[str, Any]) -> StorageMeta:
    checkpoint_id = fields.get("checkpoint_id")
    if isinstance(checkpoint_id, tuple):  # the parts of a path
        checkpoint_id = Path(*checkpoint_id)
    return StorageMeta(checkpoint_id, fields.get("save_id"), fields.get("load_id"), list(fields.get("modules") or ()))
