"""The metadata of a save that has been written: encoded without an object per part, and sent as a word on where it is.

``dcp.save`` broadcasts the metadata to every rank, which at a thousand ranks would pickle it once more for each.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import RankFile
from torchtitan_ext.storage.lazy_metadata import lazy_parts
from torchtitan_ext.storage.metadata_file import columns_of, parse_index_metadata, parse_metadata, storage_meta_fields

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
