"""DCP's ``.metadata``: written without an object per part, read without running it, sent as the place of its file.

The file is a pickle, and unpickling runs what it names. ``csrc/core/metadata_pickle.h`` reads it as data, by an
allow-list, into columns; DCP's objects are made of them when they are asked for. ``dcp.save`` broadcasts the metadata
of a save to every rank, which at a thousand ranks would pickle it once more for each: so written metadata pickles as
the path, size and digest of its file.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
from torchtitan_ext.dcp_private import MEM_FORMAT_ENCODING
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import RankFile, shown
from torchtitan_ext.storage.metadata.lazy_metadata import lazy_entries, lazy_parts
from torchtitan_ext.storage.metadata.saved_metadata import columns_of_tables
from torchtitan_ext.storage.raw_tensor import dtype_name

_ENCODED_MEMORY_FORMATS = {
    torch.contiguous_format: MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value,
    torch.channels_last: MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value,
    torch.preserve_format: MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value,
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


_FIELDS = frozenset(field.name for field in fields(Metadata))


def encode_metadata(metadata: Metadata, files: Sequence[RankFile]) -> bytes:
    """The bytes of ``.metadata``: what ``pickle.dumps`` would say, in C++ where all of it are DCP's own classes.

    Args:
        metadata: Gets its ``storage_data``; whatever else is set beforehand.
        files: What the ranks wrote.
    """
    _forget_place(metadata)
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
    return pickle.dumps(metadata)


def encode_tables(metadata: Metadata, files: Sequence[RankFile]) -> bytes:
    """What an index says in the place of ``.metadata``.

    Raises:
        ValueError: A planner gave what is no plain value.
    """
    _forget_place(metadata)
    columns = _plain_columns(metadata)
    tables = None if columns is None else columns.to_tables(metadata.planner_data, *_plain_rest(metadata))
    if columns is None or tables is None:
        raise ValueError(
            "FileWriter(stock_metadata=False): the planner's metadata has more than DCP's own classes and plain values "
            "in it, which only a pickle can hold; save with stock_metadata=True"
        )
    _add_files(columns, files)
    metadata.storage_data = lazy_parts(columns)
    return tables


def send_as_place(metadata: Metadata, path: Path, content: bytes) -> None:
    """From now on the metadata pickles as the file that it can be read from again, as long as nobody changes it.

    Args:
        path: Of ``.metadata``, or of the index that stands for it.
        content: Of that file.
    """
    if type(metadata) is Metadata:
        place = _Place(path, len(content), _core.digest(content))
        _change_class(metadata, _WrittenMetadata)
        vars(metadata)["_written"] = (place, _fields_of(metadata))


@dataclass(frozen=True)
class _Place:
    path: Path
    num_bytes: int
    digest: int

    def is_there(self) -> bool:
        try:
            return self.path.stat().st_size == self.num_bytes
        except OSError:
            return False

    def read(self) -> Metadata:
        content = self.path.read_bytes()
        if (len(content), _core.digest(content)) != (self.num_bytes, self.digest):
            raise DamagedCheckpointError(
                f"{self.path} is not what the save wrote: another one has saved over it; read its metadata with "
                "FileReader"
            )
        parse: Callable[[bytes, Path], Metadata] = parse_index_metadata if "index" in self.path.name else _parse_file
        return parse(content, self.path)


class _WrittenMetadata(Metadata):
    """Metadata that is in a file, too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __reduce__(self) -> Any:
        place, written = vars(self).get("_written", (None, ()))
        if place is not None and _is_same(written, _fields_of(self)) and place.is_there():
            return _ReadLater, (place,)
        return Metadata.__new__, (Metadata,), self._values()

    def __copy__(self) -> Metadata:
        """Without a word on a file, which may be gone before the copy is used."""
        plain = Metadata.__new__(Metadata)
        vars(plain).update(self._values())
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        return copy.deepcopy(self.__copy__(), memo)

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_written"}


class _ReadLater(Metadata):
    """Becomes the metadata when one of its fields is asked for."""

    def __init__(self, place: _Place) -> None:
        vars(self)["_place"] = place

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            _become(self)
            return getattr(self, name)
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        _become(self)
        return self == other

    def __reduce__(self) -> Any:
        return _ReadLater, (vars(self)["_place"],)


def _fields_of(metadata: Metadata) -> list[tuple[Any, int]]:
    """The fields, and how large they are: what tells of most changes without a look at millions of parts."""
    values = [getattr(metadata, name) for name in sorted(_FIELDS)]
    return [(value, len(value) if isinstance(value, dict) else 0) for value in values]


def _is_same(written: Sequence[tuple[Any, int]], now: Sequence[tuple[Any, int]]) -> bool:
    pairs = zip(written, now, strict=True)
    return all(old is new and old_size == new_size for (old, old_size), (new, new_size) in pairs)


def _become(later: _ReadLater) -> None:
    read = vars(later)["_place"].read()
    vars(later).clear()
    _change_class(later, Metadata)
    vars(later).update(vars(read))


def _forget_place(metadata: Metadata) -> None:
    """Of a planner's metadata that it has kept since the save before."""
    if type(metadata) is _WrittenMetadata:
        _change_class(metadata, Metadata)
        vars(metadata).pop("_written", None)


def _change_class(metadata: Metadata, new: type[Metadata]) -> None:
    object.__setattr__(metadata, "__class__", new)


def _parse_file(content: bytes, path: Path) -> Metadata:
    return parse_metadata(content)


def _plain_columns(metadata: Metadata) -> _core.MetadataColumns | None:
    is_plain = type(metadata) is Metadata and vars(metadata).keys() <= _FIELDS
    return columns_of(metadata.state_dict_metadata) if is_plain else None


def _plain_rest(metadata: Metadata) -> tuple[dict[str, Any], str]:
    assert metadata.storage_meta is not None and metadata.version is not None
    return storage_meta_fields(metadata.storage_meta), metadata.version


def _add_files(columns: _core.MetadataColumns, files: Sequence[RankFile]) -> None:
    for file in files:
        columns.add_records(file.name, file.records, file.footer_offset)
