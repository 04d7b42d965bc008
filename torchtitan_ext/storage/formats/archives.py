"""Whether archives of ``torch.save`` are whole, by their sizes and the CRC-32 of their entries. Imports no torch.

torch writes a CRC of each entry, and compares none when it reads. Zero means no CRC: so it is with torch's option
``compute_crc32=False``, and in records of ours, whose files have better checksums. How many bytes the tensors of an
archive need of each storage is read from its pickle, and nothing that the pickle names is run.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.state.pickled_keys import Anything, EndlessKeyError, KeyReader, check_keys
from torchtitan_ext.storage.element_types import ITEM_BYTES, UNTYPED, dtype_name_of, elements_needed
from torchtitan_ext.storage.progress import OnBytes

_READ_BYTES = 1 << 20

# The lengths of name and extra field end the local header of an entry.
_ENTRY_HEAD = struct.Struct("<26xHH")

_SAVE_AGAIN = "load and save it once more"

# What zipfile raises where an archive is not as it should be.
BAD_ARCHIVE = (
    zipfile.BadZipFile,
    NotImplementedError,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    struct.error,
)


class FilePart(io.RawIOBase):
    """Bytes [begin, begin + num_bytes) of an open file, as a file of their own."""

    def __init__(self, descriptor: int, begin: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"got byte {start + offset}, expected one that is not negative")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._num_bytes - self._at))
        found = os.preadv(self._descriptor, [memoryview(buffer)[:count]], self._begin + self._at)
        self._at += found
        return found


def find_entries(path: Path) -> dict[str, tuple[int, int]]:
    """Where the bytes of each entry of an archive begin, and how many these are, by name.

    Raises:
        DamagedCheckpointError: It is no archive of ``torch.save``, or its entries do not lie there as in memory.
    """
    entries: dict[str, tuple[int, int]] = {}
    byte_order: str = sys.byteorder
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            listed = _listed(archive, path.stat().st_size)
            for entry in listed:
                entries[_name_in_archive(entry)] = (_begin_of(file, entry), entry.file_size)
                if _name_in_archive(entry) == "data.pkl" and entry.compress_type == zipfile.ZIP_STORED:
                    check_keys(io.BytesIO(read_entry(file, entry)), entry.file_size)
                if _name_in_archive(entry) == "byteorder" and entry.compress_type == zipfile.ZIP_STORED:
                    byte_order = read_entry(file, entry).decode()
    except BAD_ARCHIVE as error:
        raise DamagedCheckpointError(
            f"{path} is no archive of torch.save: it is damaged, or of torch before 1.6 ({error}); {_SAVE_AGAIN}"
        ) from None
    compressed = [entry.filename for entry in listed if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise DamagedCheckpointError(
            f"{path}: its entry {compressed[0]} is compressed, which torch.save never does; {_SAVE_AGAIN}"
        )
    if byte_order != sys.byteorder:
        raise DamagedCheckpointError(
            f"{path}: its numbers are {byte_order}-endian, expected {sys.byteorder}-endian ones; {_SAVE_AGAIN}"
        )
    return entries


def read_entry(stream: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry that is not compressed; no CRC is compared, which need not be there."""
    stream.seek(_begin_of(stream, entry))
    return stream.read(entry.file_size)


def archive_damage(stream: BinaryIO, *, is_deep: bool, on_bytes: OnBytes) -> tuple[str | None, bool]:
    """What is wrong with an archive, or ``None``; and whether all of its entries have a CRC.

    Args:
        is_deep: Read all entries and compare; else look at the archive's directory and its pickle alone.
    """
    is_proved = True
    try:
        with zipfile.ZipFile(stream) as archive:
            listed = _listed(archive, stream.seek(0, os.SEEK_END))
            entries = {_name_in_archive(entry): entry for entry in listed}
            for entry in entries.values():
                if entry.compress_type != zipfile.ZIP_STORED:
                    return f"its entry {entry.filename} is compressed, which torch.save never does", False
                is_proved = is_proved and (entry.CRC != 0 or entry.file_size == 0)
                if is_deep and entry.CRC != 0:
                    _compare(archive, entry, on_bytes)
            if "data.pkl" not in entries:
                return "the archive has no data.pkl, in which torch.save says what it holds", False
            found = find_storages(read_entry(stream, entries["data.pkl"]))
            for storage, num_bytes in found.items():
                data = entries.get(f"data/{storage}")
                if data is None or data.file_size < num_bytes:
                    there = 0 if data is None else data.file_size
                    return f"storage {storage} has {there} bytes, what is in it needs {num_bytes}", False
    except BAD_ARCHIVE as error:
        return f"the archive of torch.save is damaged ({error})", False
    return None, is_proved


def _listed(archive: zipfile.ZipFile, num_bytes: int) -> list[zipfile.ZipInfo]:
    """The entries of an archive of so many bytes. Raises BadZipFile where they cannot lie in it side by side: a small
    file can have very many that share their bytes."""
    entries = archive.infolist()
    stored = [entry for entry in entries if entry.compress_type == zipfile.ZIP_STORED]
    said = sum(max(entry.file_size, entry.compress_size) for entry in stored)
    if said > num_bytes:
        raise zipfile.BadZipFile(f"its entries have {said} bytes, the archive {num_bytes}")
    return entries


def _name_in_archive(entry: zipfile.ZipInfo) -> str:
    """Without the folder that is named as the file."""
    return entry.filename.partition("/")[2]


def _begin_of(stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    stream.seek(entry.header_offset)
    head = stream.read(_ENTRY_HEAD.size)
    return entry.header_offset + _ENTRY_HEAD.size + sum(_ENTRY_HEAD.unpack(head))


def _compare(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, on_bytes: OnBytes) -> None:
    """Raises BadZipFile where the bytes of an entry are not those of its CRC."""
    with archive.open(entry) as content:
        num_bytes = 0
        while part := content.read(_READ_BYTES):
            num_bytes += len(part)
            on_bytes(len(part))
    if num_bytes != entry.file_size:
        raise EOFError(f"{entry.filename} ends after {num_bytes} of {entry.file_size} bytes")


_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")

# Behind strides, in the arguments of _rebuild_tensor_v3, whose storages are untyped.
_DTYPE_POSITION = 2


def find_storages(data: bytes) -> dict[str, int]:
    """The bytes that are needed of each storage, by its name in the archive.

    Raises:
        EndlessKeyError: Whoever unpickles it as it is meant does not come to an end.
        ValueError: It is no pickle, or one of something else.
    """
    reader = _StorageReader(data)
    try:
        reader.load()
    except EndlessKeyError:
        raise
    except Exception as error:  # whatever bytes make of a pickle's machine
        raise ValueError(f"its pickle cannot be read: {type(error).__name__}, {error}") from None
    return reader.needed


class _Storage(NamedTuple):
    name: str
    storage_class: str


class _StorageReader(KeyReader):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), len(data))
        self.needed: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return self._add_tensor
        return Anything(name)

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_class, name, _, num_elements = pid
        if kind != "storage" or type(name) is not str:
            raise ValueError("a persistent id is none of a storage")
        storage = _Storage(name, storage_class.__name__)
        item_bytes = 1 if storage.storage_class == UNTYPED else _item_bytes(storage, "")
        self._add(storage, item_bytes, _whole([num_elements])[0])
        return storage

    def _add_tensor(self, storage: _Storage, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Anything:
        dtype = rest[_DTYPE_POSITION] if len(rest) > _DTYPE_POSITION else None
        item_bytes = _item_bytes(storage, getattr(dtype, "__name__", ""))
        self._add(storage, item_bytes, elements_needed(_whole(sizes), _whole(strides), *_whole([offset])))
        return Anything()

    def _add(self, storage: _Storage, item_bytes: int, num_elements: int) -> None:
        self.needed[storage.name] = max(self.needed.get(storage.name, 0), item_bytes * num_elements)


def _whole(numbers: Any) -> list[int]:
    """Sizes, strides and the like as a list. Raises ValueError where they are something else, such as lists, of which a
    multiple is a longer list."""
    found = list(numbers)
    if not all(type(number) is int and 0 <= number < 2**63 for number in found):
        raise ValueError("a tensor has sizes, strides or an offset that no tensor has")
    return found


def _item_bytes(storage: _Storage, dtype: str) -> int:
    """0 where they are not known, as of quantised numbers."""
    name = dtype_name_of(storage.storage_class, dtype)
    return 0 if name is None else ITEM_BYTES[name]
