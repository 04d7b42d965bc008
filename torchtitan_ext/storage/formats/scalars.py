"""Reads single numbers and texts of a checkpoint, numbers in their shortest form. Imports no torch.

Nothing is unpickled: only a pickle of one plain value is read.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import find_stock_tensors
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint
from torchtitan_ext.storage.formats.archives import BAD_ARCHIVE, read_entry
from torchtitan_ext.storage.formats.contents import Scalar
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata

# A record of torch.save with one value in it has some 1,300 bytes; a longer text is nothing for a table.
_MAX_RECORD_BYTES = 1 << 14

# Files of a checkpoint that are held open together.
_MAX_OPEN_FILES = 128

_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False}
_FRAMING = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def plain_value_of(pickled: bytes) -> Scalar:
    """The value of a pickle that is one number, text, truth value or ``None``.

    Raises:
        ValueError: It is more, or none.
    """
    found: list[Scalar] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _VALUES:
            found.append(_CONSTANTS.get(opcode.name, argument))
        elif opcode.name not in _FRAMING:
            raise ValueError(f"{opcode.name} makes more than a plain value")
    (value,) = found
    return value


def read_number(descriptor: int, fqn: str, stored: _core.StoredTensor) -> dict[str, Scalar]:
    """The element of a tensor without dims, by its name; empty if it cannot be read."""
    data = os.pread(descriptor, stored.item_bytes, stored.data_offset)
    number = _core.number_of(data, stored.dtype) if len(data) == stored.item_bytes else None
    return {} if number is None else {fqn: number}


def read_scalars(path: Path, saved: SavedMetadata, keys: Iterable[tuple[str, bool]]) -> dict[str, Scalar]:
    """Single plain values of a DCP checkpoint; values that cannot be read are left out. Compares no checksums.

    Args:
        keys: Names of keys, each with whether it is a tensor.
    """
    of_file: dict[str, list[tuple[str, bool, int, int]]] = {}
    for fqn, is_tensor in keys:
        part = saved.columns.find_part(fqn, () if is_tensor else None)
        if part is not None:
            place = saved.columns.part(part)
            of_file.setdefault(place.path, []).append((fqn, is_tensor, place.offset, place.num_bytes))
    values: dict[str, Scalar] = {}
    for number, name in enumerate(sorted(of_file)):
        if number % _MAX_OPEN_FILES == 0:
            files = OpenedCheckpoint(path)
        try:
            descriptor = files.descriptor(name)
            tensors = {offset: size for _, is_tensor, offset, size in of_file[name] if is_tensor}
            stored = _stored(path / name, saved, name, tensors, descriptor)
            for fqn, is_tensor, offset, num_bytes in of_file[name]:
                if is_tensor:
                    tensor = stored.get(offset)
                    values |= {} if tensor is None or tensor.sizes else read_number(descriptor, fqn, tensor)
                elif num_bytes <= _MAX_RECORD_BYTES:
                    values |= _value_of_record(fqn, os.pread(descriptor, num_bytes, offset))
        except (OSError, ValueError, OverflowError, DamagedCheckpointError):  # the metadata may say the impossible
            continue
    return values


def _stored(
    path: Path, saved: SavedMetadata, name: str, tensors: dict[int, int], descriptor: int
) -> dict[int, _core.StoredTensor | None]:
    """The tensors in a file, by the offsets of their records."""
    known = {} if saved.index is None or name not in saved.index.files else saved.index.tensors(name)
    unknown = {offset: size for offset, size in tensors.items() if offset not in known}
    return {**known, **find_stock_tensors(path, unknown, 1, descriptor)}


def _value_of_record(fqn: str, record: bytes) -> dict[str, Scalar]:
    stream = io.BytesIO(record)
    try:
        with zipfile.ZipFile(stream) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            return {fqn: plain_value_of(read_entry(stream, entry))}
    except BAD_ARCHIVE:
        return {}
