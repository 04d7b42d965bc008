"""Verifies archives of ``torch.save`` by their sizes and the CRC-32 of their entries. Imports no torch.

torch writes a CRC of each entry, and does not compare it when it reads. Zero means no CRC: torch's option
``compute_crc32=False`` writes it, and so do we, since our files have better checksums. The pickle of an archive shows
how many bytes its tensors need of each storage; it is parsed and not run.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.progress import OnBytes

_READ_BYTES = 1 << 20

# The lengths of name and extra field end the local header of an entry.
_ENTRY_HEAD = struct.Struct("<26xHH")

_SAVE_AGAIN = "load and save it once more"

# The exceptions of zipfile for a damaged archive.
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
    """First byte and size of each entry of an archive, by name.

    Raises:
        DamagedCheckpointError: The file is no archive of ``torch.save``, its entries are compressed, or its byte order
            is not this machine's.
    """
    entries: dict[str, tuple[int, int]] = {}
    byte_order: str = sys.byteorder
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            listed = _listed(archive, path.stat().st_size)
            for entry in listed:
                entries[_name_in_archive(entry)] = (_begin_of(file, entry), entry.file_size)
                if _name_in_archive(entry) == "data.pkl" and entry.compress_type == zipfile.ZIP_STORED:
                    _core.check_pickle_keys(read_entry(file, entry), 1)
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
    """The bytes of an entry that is not compressed; its CRC, if any, is not compared."""
    stream.seek(_begin_of(stream, entry))
    return stream.read(entry.file_size)


def archive_damage(stream: BinaryIO, *, is_deep: bool, on_bytes: OnBytes) -> tuple[str | None, bool]:
    """The damage of an archive, or ``None``; and whether all its entries have a CRC.

    Args:
        is_deep: Read all entries and compare their CRCs; else read only the archive's directory and its pickle.
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
            found = _core.find_storages(read_entry(stream, entries["data.pkl"]))
            for storage, num_bytes in found:
                data = entries.get(f"data/{storage}")
                if data is None or data.file_size < num_bytes:
                    there = 0 if data is None else data.file_size
                    return f"storage {storage} has {there} bytes, what is in it needs {num_bytes}", False
    except BAD_ARCHIVE as error:
        return f"the archive of torch.save is damaged ({error})", False
    return None, is_proved


def _listed(archive: zipfile.ZipFile, num_bytes: int) -> list[zipfile.ZipInfo]:
    """The entries of an archive. Raises BadZipFile if together they are larger than the archive: in a small file very
    many entries can share the same bytes."""
    entries = archive.infolist()
    stored = [entry for entry in entries if entry.compress_type == zipfile.ZIP_STORED]
    said = sum(max(entry.file_size, entry.compress_size) for entry in stored)
    if said > num_bytes:
        raise zipfile.BadZipFile(f"its entries have {said} bytes, the archive {num_bytes}")
    return entries


def _name_in_archive(entry: zipfile.ZipInfo) -> str:
    """The name without the top folder, which has the name of the file."""
    return entry.filename.partition("/")[2]


def _begin_of(stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    stream.seek(entry.header_offset)
    head = stream.read(_ENTRY_HEAD.size)
    return entry.header_offset + _ENTRY_HEAD.size + sum(_ENTRY_HEAD.unpack(head))


def _compare(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, on_bytes: OnBytes) -> None:
    """Raises BadZipFile if the bytes of an entry do not match its CRC."""
    with archive.open(entry) as content:
        num_bytes = 0
        while part := content.read(_READ_BYTES):
            num_bytes += len(part)
            on_bytes(len(part))
    if num_bytes != entry.file_size:
        raise EOFError(f"{entry.filename} ends after {num_bytes} of {entry.file_size} bytes")
