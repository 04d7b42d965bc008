"""The mappings of a checkpoint's metadata as dicts that make an entry when a caller asks for it.

At a thousand ranks a checkpoint has millions of parts, and a rank reads some thousands of them. A call that needs all
entries makes them all; from then on the mapping is an ordinary dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar

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
from torchtitan_ext.dcp_private import MEM_FORMAT_ENCODING, StorageInfo

MEMORY_FORMATS = {
    MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value: torch.contiguous_format,
    MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value: torch.channels_last,
    MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value: torch.preserve_format,
}
"""By DCP's numbers."""

PROPERTIES = tuple(field.name for field in fields(TensorProperties))
"""The fields that tensors have in the metadata of this torch: ``strides`` came with torch 2.15."""

Entry = TensorStorageMetadata | BytesStorageMetadata
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class MetadataInFile(Protocol):
    """A file that holds a metadata."""

    @property
    def metadata(self) -> Metadata: ...

    def is_current(self) -> bool:
        """Whether the file still holds what the metadata holds."""


FieldInFile = tuple[MetadataInFile, str]
"""Where a mapping lies: in a file, in a field of its metadata."""


class LazyDict(dict[_Key, _Value]):
    """A dict that makes its entries from columns when they are asked for.

    The underlying dict keeps the entries made so far. A method that changes the mapping or needs all entries makes them
    all first. A mapping with a ``place`` pickles as that place until it is changed; the unpickled mapping reads the
    file at its first use.
    """

    _source: _Entries | _Parts | None = None
    _unread: FieldInFile | None = None
    place: FieldInFile | None = None

    @classmethod
    def over(cls, source: _Entries | _Parts) -> LazyDict[_Key, _Value]:
        lazy: LazyDict[_Key, _Value] = cls()
        lazy._source = source
        return lazy

    @property
    def columns(self) -> _core.MetadataColumns | None:
        """The columns behind the mapping; ``None`` once all entries are made."""
        source = self._opened()
        return None if source is None else source.columns

    def _opened(self) -> Any:
        """The source of entries that are not made yet, which numbers them in the order of the dict, or ``None``.

        Reads the file of an unpickled mapping.
        """
        if self._unread is not None:
            file, field = self._unread
            mapping = getattr(file.metadata, field)
            if isinstance(mapping, LazyDict):
                self._source = mapping._source
            else:
                super().update(mapping)
            self._unread = None  # last: another thread that asks meanwhile reads, too
        return self._source

    def __missing__(self, key: Any) -> _Value:
        source = self._opened()
        if super().__contains__(key):  # it came with the file
            return super().__getitem__(key)
        number = None if source is None else source.find(key)
        if source is None or number is None:
            raise KeyError(key)
        value = source.value(number)
        super().__setitem__(key, value)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        source = self._opened()
        return super().__contains__(key) or (source is not None and source.find(key) is not None)

    def __len__(self) -> int:
        source = self._opened()
        return super().__len__() if source is None else len(source)

    def __iter__(self) -> Iterator[_Key]:
        source = self._opened()
        if source is None:
            return super().__iter__()
        return (source.key(number) for number in range(len(source)))

    def keys(self) -> Any:
        return super().keys() if self._opened() is None else KeysView(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self._unread or self.place
        if place is not None and (place is self._unread or place[0].is_current()):
            return _read_later, (place,)
        return dict, (dict(self.items()),)

    def __copy__(self) -> dict[_Key, _Value]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[_Key, _Value]:
        return copy.deepcopy(self.__copy__(), memo)

    def copy(self) -> dict[_Key, _Value]:
        return self.__copy__()

    def _fill(self) -> None:
        """Makes all entries, in order; entries made before stay the same objects."""
        source = self._opened()
        if source is None:
            return
        known = {key: dict.__getitem__(self, key) for key in dict.keys(self)}
        entries: dict[_Key, _Value] = {}
        for number in range(len(source)):
            key = source.key(number)
            entries[key] = known[key] if key in known else source.value(number)
        super().clear()
        super().update(entries)
        self._source = None  # last: what another thread asks for meanwhile is found


def _read_later(place: FieldInFile) -> LazyDict[Any, Any]:
    lazy: LazyDict[Any, Any] = LazyDict()
    lazy._unread = place
    return lazy


_READING = ("__eq__", "__ne__", "__or__", "__ror__", "__repr__", "__reversed__", "values", "items")
_CHANGING = ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "clear", "update", "setdefault")


def _filling(name: str) -> Callable[..., Any]:
    """A method of dict that needs all entries."""
    method = getattr(dict, name)

    def call(self: LazyDict[Any, Any], *args: Any, **kwargs: Any) -> Any:
        self._fill()
        if name in _CHANGING:
            self.place = None
        for other in args:
            if isinstance(other, LazyDict):
                other._fill()
        return method(self, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _READING + _CHANGING:
    setattr(LazyDict, _name, _filling(_name))


class _Entries:
    def __init__(self, columns: _core.MetadataColumns) -> None:
        self.columns = columns
        self._names = columns.names_of_keys()
        self._chunk_lists: dict[int, list[ChunkStorageMetadata]] = {}
        # Keys share them, as those of one save do in memory: thousands of objects would wake the garbage collector.
        self._properties: dict[tuple[Any, ...], TensorProperties] = {}
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def __len__(self) -> int:
        return len(self._names)

    def find(self, key: object) -> int | None:
        return self.columns.find_key(key) if isinstance(key, str) else None

    def key(self, number: int) -> str:
        return self._names[number]

    def value(self, number: int) -> Entry:
        key = self.columns.key(number)
        if key is None:
            return BytesStorageMetadata()
        alike = (key.dtype, key.layout, key.requires_grad, key.memory_format, key.pin_memory, key.strides)
        if alike not in self._properties:
            self._properties[alike] = TensorProperties(
                dtype=getattr(torch, key.dtype),
                layout=torch.serialization._get_layout(key.layout),
                requires_grad=key.requires_grad,
                memory_format=MEMORY_FORMATS[key.memory_format],
                pin_memory=key.pin_memory,
                **({"strides": key.strides} if "strides" in PROPERTIES else {}),
            )
        sizes = self._sizes.setdefault(key.sizes, torch.Size(key.sizes))
        return TensorStorageMetadata(self._properties[alike], sizes, self._chunks(key.chunk_list))

    def _chunks(self, number: int) -> list[ChunkStorageMetadata]:
        """One shared list for all keys with equal lists: planners look through each list once."""
        if number not in self._chunk_lists:
            self._chunk_lists[number] = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes in self.columns.chunk_list(number)
            ]
        return self._chunk_lists[number]


class _Parts:
    def __init__(self, columns: _core.MetadataColumns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return self.columns.num_parts

    def find(self, key: object) -> int | None:
        return self.columns.find_part(key.fqn, key.offset) if isinstance(key, MetadataIndex) else None

    def key(self, number: int) -> MetadataIndex:
        part = self.columns.part(number)
        return MetadataIndex(part.fqn, part.offsets, part.index)

    def value(self, number: int) -> StorageInfo:
        part = self.columns.part(number)
        if part.transforms is None:
            return StorageInfo(part.path, part.offset, part.num_bytes)
        return StorageInfo(part.path, part.offset, part.num_bytes, part.transforms)


def columns_behind(mapping: object) -> _core.MetadataColumns | None:
    """The columns of a mapping of metadata, which are asked without making its entries; ``None`` of a plain dict."""
    return mapping.columns if isinstance(mapping, LazyDict) else None


def is_saved_tensor(entries: Mapping[str, Entry], fqn: str) -> bool | None:
    """Whether a key is a tensor; ``None`` where there is none."""
    columns = columns_behind(entries)
    if columns is not None:
        return columns.is_tensor(fqn)
    saved = entries.get(fqn)
    return None if saved is None else isinstance(saved, TensorStorageMetadata)


def lazy_entries(columns: _core.MetadataColumns) -> LazyDict[str, Entry]:
    """``Metadata.state_dict_metadata`` for these columns."""
    return LazyDict.over(_Entries(columns))


def lazy_parts(columns: _core.MetadataColumns) -> LazyDict[MetadataIndex, StorageInfo]:
    """``Metadata.storage_data`` for these columns."""
    return LazyDict.over(_Parts(columns))
