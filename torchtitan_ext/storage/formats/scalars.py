"""Reads single numbers and texts of a checkpoint, numbers in their shortest form. Imports no torch.

Nothing is unpickled: only a pickle of one plain value is read.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import struct
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

_FORMATS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?", "complex64": "ff", "complex128": "dd",
}  # fmt: skip

# Bits of the significand, and the exponent of the smallest number above zero.
_FLOATS = {
    "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133), "float8_e4m3fn": (4, -9),
    "float8_e4m3fnuz": (4, -10), "float8_e5m2": (3, -16), "float8_e5m2fnuz": (3, -17),
}  # fmt: skip

_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False}
_FRAMING = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def shortest(value: float, dtype: str) -> float:
    """The number with the fewest digits that is this element of a tensor: 0.1 for 0.10000000149011612 of float32.

    Args:
        value: The exact value of the element.
        dtype: The tensor's dtype; only numbers of floats narrower than float64 change.
    """
    if dtype not in _FLOATS or value == 0 or not math.isfinite(value):
        return value
    bits, least = _FLOATS[dtype]
    fraction, exponent = math.frexp(abs(value))
    half = math.ldexp(0.5, max(exponent - bits, least))  # to where the next number would be meant
    for digits in range(1, 17):
        found = float(f"{value:.{digits}g}")
        is_below = fraction == 0.5 and exponent - bits > least and abs(found) < abs(value)
        if abs(found - value) < (half / 2 if is_below else half):  # below a power of two numbers lie closer
            return found
    return value


def number_of(data: bytes, dtype: str) -> Scalar:
    """The number in an element's bytes, in its shortest form; ``None`` for an unknown dtype."""
    if dtype == "bfloat16":
        return shortest(struct.unpack("<f", b"\0\0" + data)[0], dtype)
    if dtype not in _FORMATS:
        return None
    parts = struct.unpack(f"<{_FORMATS[dtype]}", data)
    if len(parts) == 2:
        part = "float32" if dtype == "complex64" else "float64"
        return complex(shortest(parts[0], part), shortest(parts[1], part))
    number: bool | int | float = parts[0]
    return shortest(number, dtype) if isinstance(number, float) else number


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
    number = number_of(data, stored.dtype) if len(data) == stored.item_bytes else None
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
