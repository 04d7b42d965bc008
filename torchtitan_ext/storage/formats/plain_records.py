"""Reads values of a DCP checkpoint that are dicts, lists and numbers, without running what they name. Imports no torch.

Containers are made as they were; whatever else a pickle would make, a tensor or an object of some class, comes out as
an ``Unread``. ``scalars`` reads single numbers.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.formats.archives import BAD_ARCHIVE, read_entry
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata
from torchtitan_ext.storage.objects.opened import open_checkpoint

# Of a value that describes something; a larger one holds data.
_MAX_RECORD_BYTES = 1 << 24

# Files of a checkpoint that are held open together.
_MAX_OPEN_FILES = 128

RecordPlace = tuple[str, int, int]
"""A key, and the first byte and the size of its record in a file."""

_BAD_PICKLE = (pickle.UnpicklingError, AttributeError, IndexError, KeyError, TypeError, MemoryError, RecursionError)


class Unread:
    """Stands for an object that was not made: it takes all that a pickle does to an object, and keeps nothing."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass


# Python's own machine, in Python: the one in C makes an array as long as any number in the stream says.
class _Containers(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Unread

    def persistent_load(self, pid: object) -> Any:
        return Unread()


def containers_of(pickled: bytes) -> Any:
    """The value of a pickle, with an ``Unread`` for whatever is neither a container nor a plain value."""
    _core.check_pickle_keys(pickled, 1)
    return _Containers(io.BytesIO(pickled)).load()


def read_records(
    path: Path | Location,
    saved: SavedMetadata,
    fqns: Iterable[str],
    *,
    max_bytes: int = _MAX_RECORD_BYTES,
    loads: Callable[[bytes], Any] = containers_of,
) -> dict[str, Any]:
    """The values of these keys; those that cannot be read, or have longer records, are left out.

    Args:
        loads: Makes the value of a pickle; raises ValueError to leave it out.
    """

    def read(name: str, descriptor: int, places: Sequence[RecordPlace]) -> Iterator[tuple[str, Any]]:
        for fqn, offset, num_bytes in places:
            if num_bytes <= max_bytes:
                yield from _value_of(fqn, os.pread(descriptor, num_bytes, offset), loads).items()

    return read_places(path, saved, ((fqn, None) for fqn in fqns), read)


def read_places(
    path: Path | Location,
    saved: SavedMetadata,
    keys: Iterable[tuple[str, tuple[int, ...] | None]],
    read: Callable[[str, int, Sequence[RecordPlace]], Iterable[tuple[str, Any]]],
) -> dict[str, Any]:
    """Values by key, file by file; what cannot be read is left out. Compares no checksums.

    Args:
        keys: Each with the offsets of the chunk that is read of a tensor; ``None`` for a value.
        read: Gives keys and values of one file, from its name, its descriptor and the places of records in it.
    """
    of_file: dict[str, list[RecordPlace]] = {}
    for fqn, offsets in keys:
        part = saved.columns.find_part(fqn, offsets)
        if part is not None:
            place = saved.columns.part(part)
            of_file.setdefault(place.path, []).append((fqn, place.offset, place.num_bytes))
    values: dict[str, Any] = {}
    for number, name in enumerate(sorted(of_file)):
        if number % _MAX_OPEN_FILES == 0:
            files = open_checkpoint(path)
        try:
            files.bring(name, {offset: num_bytes for _, offset, num_bytes in of_file[name]})
            for fqn, value in read(name, files.descriptor(name), of_file[name]):
                values[fqn] = value
        except (OSError, ValueError, OverflowError, DamagedCheckpointError):  # the metadata may say the impossible
            continue
    return values


def _value_of(fqn: str, record: bytes, loads: Callable[[bytes], Any]) -> dict[str, Any]:
    stream = io.BytesIO(record)
    try:
        with zipfile.ZipFile(stream) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            return {fqn: loads(read_entry(stream, entry))}
    except (*BAD_ARCHIVE, *_BAD_PICKLE):
        return {}
