"""Reads values of a DCP checkpoint that are dicts, lists and numbers, without running what they name. Imports no torch.

``scalars`` reads single numbers. Here containers are made as they were; whatever else a pickle would make, a tensor or
an object of some class, comes out as an ``Unread``.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint
from torchtitan_ext.storage.formats.archives import BAD_ARCHIVE, read_entry
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata

# Of a value that describes something; a larger one holds data.
_MAX_RECORD_BYTES = 1 << 24

# Files of a checkpoint that are held open together.
_MAX_OPEN_FILES = 128

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


def read_records(path: Path, saved: SavedMetadata, fqns: Sequence[str]) -> dict[str, Any]:
    """The values of these keys; those that cannot be read are left out. Compares no checksums."""
    of_file: dict[str, list[tuple[str, int, int]]] = {}
    for fqn in fqns:
        part = saved.columns.find_part(fqn, None)
        if part is not None:
            place = saved.columns.part(part)
            of_file.setdefault(place.path, []).append((fqn, place.offset, place.num_bytes))
    values: dict[str, Any] = {}
    for number, name in enumerate(sorted(of_file)):
        if number % _MAX_OPEN_FILES == 0:
            files = OpenedCheckpoint(path)
        try:
            descriptor = files.descriptor(name)
            for fqn, offset, num_bytes in of_file[name]:
                if num_bytes <= _MAX_RECORD_BYTES:
                    values |= _value_of(fqn, os.pread(descriptor, num_bytes, offset))
        except (OSError, ValueError, OverflowError, DamagedCheckpointError):  # the metadata may say the impossible
            continue
    return values


def _value_of(fqn: str, record: bytes) -> dict[str, Any]:
    stream = io.BytesIO(record)
    try:
        with zipfile.ZipFile(stream) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            pickled = read_entry(stream, entry)
        _core.check_pickle_keys(pickled, 1)
        return {fqn: _Containers(io.BytesIO(pickled)).load()}
    except (*BAD_ARCHIVE, *_BAD_PICKLE):
        return {}
