"""DCP's ``.metadata``: written without an object per part, read without unpickling, sent to other ranks as a path.

The file is a pickle, and unpickling would run the functions that it names. ``csrc/core/metadata_pickle.h`` parses it
with an allow-list into columns; the objects of DCP are made when a caller asks for them. ``dcp.save`` broadcasts the
saved metadata to every rank, hundreds of megabytes at a thousand ranks: so the mappings of saved metadata pickle as
path, size and digest of the file that holds them.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.metadata.lazy_metadata import (
    MEMORY_FORMATS,
    PROPERTIES,
    LazyDict,
    columns_behind,
    lazy_entries,
    lazy_parts,
)
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata, parse_pickle


def parse_metadata(data: bytes) -> Metadata:
    """The metadata in the bytes of a ``.metadata`` file (torch 2.1 to 2.15), equal to what ``pickle.loads`` returns.

    The mappings are lazy, and keys with equal chunk lists share one list.

    Raises:
        ValueError: The bytes are damaged, or name something that is not part of a checkpoint's metadata.
    """
    return metadata_of(parse_pickle(data, PROPERTIES))


def metadata_of(parsed: _core.ParsedMetadata | SavedMetadata) -> Metadata:
    """DCP's metadata for what was read of one."""
    metadata = Metadata(
        lazy_entries(parsed.columns),
        planner_data=parsed.planner_data,
        storage_data=lazy_parts(parsed.columns),
        storage_meta=None if parsed.storage_meta is None else _storage_meta(parsed.storage_meta),
    )
    metadata.version = parsed.version
    return metadata


def columns_of(state_dict_metadata: Mapping[str, Any]) -> _core.MetadataColumns | None:
    """The entries of a metadata as columns; ``None`` if an entry is of a class that is not DCP's."""
    return _core.columns_of(
        state_dict_metadata,
        bytes_class=BytesStorageMetadata,
        tensor_class=TensorStorageMetadata,
        properties_class=TensorProperties,
        chunk_class=ChunkStorageMetadata,
        size_class=torch.Size,
        memory_formats={memory_format: number for number, memory_format in MEMORY_FORMATS.items()},
    )


def storage_meta_fields(meta: StorageMeta) -> dict[str, Any]:
    """The fields as plain values; a path becomes a tuple with its text."""
    fields = dict(vars(meta))
    if isinstance(meta.checkpoint_id, PurePath):
        fields["checkpoint_id"] = (os.fspath(meta.checkpoint_id),)
    return fields


def _storage_meta(fields: dict[str, Any]) -> StorageMeta:
    checkpoint_id = fields.get("checkpoint_id")
    if isinstance(checkpoint_id, tuple):  # the parts of a path
        checkpoint_id = Path(*checkpoint_id)
    return StorageMeta(checkpoint_id, fields.get("save_id"), fields.get("load_id"), list(fields.get("modules") or ()))


_FIELDS = frozenset(field.name for field in fields(Metadata))
_MAPPINGS = ("state_dict_metadata", "planner_data", "storage_data")


def encode_metadata(metadata: Metadata, files: Sequence[_core.RankFile]) -> bytes:
    """The bytes of ``.metadata``; by ``pickle.dumps`` if the metadata has values that are neither plain nor DCP's.

    Sets ``metadata.storage_data``. All other fields must be set before.
    """
    _without_places(metadata)
    columns = _plain_columns(metadata)
    if columns is not None:
        _add_files(columns, files)
        content = columns.to_pickle(metadata.planner_data, *_plain_rest(metadata))
        if content is not None:
            metadata.storage_data = lazy_parts(columns)
            return content
    columns = _core.MetadataColumns()
    _add_files(columns, files)
    metadata.storage_data = lazy_parts(columns).copy()
    return _pickled(metadata)


def _pickled(metadata: Metadata) -> bytes:
    """By Python, in the form that every torch reads: ``TensorProperties`` without the strides of torch 2.15."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduced}
    pickler.dump(metadata)
    return out.getvalue()


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:5]  # type: ignore[attr-defined]


def send_as_place(metadata: Metadata, path: Path, content: bytes) -> None:
    """From now on the mappings of this metadata pickle as a place in the file that holds them.

    They do so as long as nobody changes them and the metadata keeps its ``storage_data``. Metadata that only Python's
    pickle could write is sent whole.

    Args:
        path: Path of ``.metadata``.
        content: Bytes of that file.
    """
    if not isinstance(metadata.storage_data, LazyDict):
        return
    file = _MetadataFile(path, len(content), _core.digest(content))
    file.stands_for(metadata)
    for field in _MAPPINGS:
        mapping = getattr(metadata, field)
        if isinstance(mapping, dict):
            mapping = mapping if isinstance(mapping, LazyDict) else LazyDict(mapping)
            mapping.place = (file, field)
            setattr(metadata, field, mapping)


class _MetadataFile:
    """A file from which a metadata can be read again."""

    def __init__(self, path: Path, num_bytes: int, digest: int) -> None:
        self._named = (path, num_bytes, digest)
        self._written: weakref.ref[Metadata] | None = None
        self._parts: weakref.ref[dict[Any, Any]] | None = None

    def __reduce__(self) -> Any:
        return _MetadataFile, self._named

    def stands_for(self, metadata: Metadata) -> None:
        """The file is current as long as the metadata has its ``storage_data`` of now: stock's planner returns the
        same metadata for the next save, and stock's writer gives it a new one and pickles it into another file."""
        self._written, self._parts = weakref.ref(metadata), weakref.ref(metadata.storage_data)

    def is_current(self) -> bool:
        written = None if self._written is None else self._written()
        if written is None or self._parts is None or written.storage_data is not self._parts():
            return False
        path, num_bytes, _ = self._named
        try:
            return path.stat().st_size == num_bytes
        except OSError:
            return False

    @cached_property
    def metadata(self) -> Metadata:
        """Read once for all mappings; raises DamagedCheckpointError where the file is another one by now."""
        path, num_bytes, digest = self._named
        content = path.read_bytes()
        if (len(content), _core.digest(content)) != (num_bytes, digest):
            raise DamagedCheckpointError(
                f"{path} is not what the save wrote: another one has saved over it; read its metadata with FileReader"
            )
        return parse_metadata(content)


def _without_places(metadata: Metadata) -> None:
    """Replaces lazy mappings of a file: a planner may return the metadata of its last save again."""
    for field in ("state_dict_metadata", "planner_data"):  # storage_data becomes that of the new save
        mapping = getattr(metadata, field)
        if isinstance(mapping, LazyDict):
            columns = mapping.columns
            setattr(metadata, field, mapping.copy() if columns is None else lazy_entries(columns))


def _plain_columns(metadata: Metadata) -> _core.MetadataColumns | None:
    if type(metadata) is not Metadata or not vars(metadata).keys() <= _FIELDS:
        return None
    columns = columns_behind(metadata.state_dict_metadata)
    return columns_of(metadata.state_dict_metadata) if columns is None else columns.keys_only()


def _plain_rest(metadata: Metadata) -> tuple[dict[str, Any], str]:
    assert metadata.storage_meta is not None and metadata.version is not None
    return storage_meta_fields(metadata.storage_meta), metadata.version


def _add_files(columns: _core.MetadataColumns, files: Sequence[_core.RankFile]) -> None:
    for file in files:
        columns.add_records(file)
