"""The dtypes whose elements are plain memory: their item sizes and their names in torch's pickles. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchtitan_ext import _core

# torch.save has a storage class for each of the older dtypes and writes the name of the younger ones.
_STORAGE_CLASSES = {
    "float64": ("DoubleStorage", 8),
    "float32": ("FloatStorage", 4),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
    "complex128": ("ComplexDoubleStorage", 16),
    "complex64": ("ComplexFloatStorage", 8),
}
_YOUNGER = {
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
UNTYPED = "UntypedStorage"

_NAME_OF_CLASS = {storage_class: name for name, (storage_class, _) in _STORAGE_CLASSES.items()}

ITEM_BYTES = {**{name: num_bytes for name, (_, num_bytes) in _STORAGE_CLASSES.items()}, **_YOUNGER}
ELEMENT_TYPES = {
    **{name: _core.ElementType(kind, "", num_bytes) for name, (kind, num_bytes) in _STORAGE_CLASSES.items()},
    **{name: _core.ElementType(UNTYPED, name, num_bytes) for name, num_bytes in _YOUNGER.items()},
}


def num_bytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """The size in bytes of a tensor's elements; the dtype is a key of ``ITEM_BYTES``."""
    return math.prod(sizes) * ITEM_BYTES[dtype]


def elements_needed(sizes: Sequence[int], strides: Sequence[int], storage_offset: int) -> int:
    """How many elements of its storage a tensor needs. An empty tensor needs none, and may begin behind the end."""
    if 0 in sizes:
        return 0
    return storage_offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def dtype_name_of(storage_class: str, name: str) -> str | None:
    """The dtype that a pickle names; ``None`` if its elements are no plain memory."""
    return (name if name in ITEM_BYTES else None) if storage_class == UNTYPED else _NAME_OF_CLASS.get(storage_class)
