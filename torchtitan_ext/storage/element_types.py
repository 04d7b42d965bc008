"""The dtypes whose elements are plain memory, by their names in torch. Imports no torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

from torchtitan_ext import _core

ELEMENT_TYPES = _core.element_types()
ITEM_BYTES = {name: element_type.item_bytes for name, element_type in ELEMENT_TYPES.items()}


def item_bytes_of(dtype: str) -> int:
    """The size of an element; of a dtype that is no plain memory only torch knows it."""
    return ITEM_BYTES.get(dtype) or int(getattr(importlib.import_module("torch"), dtype).itemsize)


def num_bytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """The size in bytes of a tensor's elements."""
    return math.prod(sizes) * item_bytes_of(dtype)


def is_floating_point(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


_HALF = {"float16", "bfloat16"}
_FLOATS = {"float32", "float64"}

EXACT_CASTS: dict[str, frozenset[str]] = {
    source: frozenset(targets)
    for source, targets in {
        "bool": {
            "uint8", "int8", "int16", "int32", "int64",
            "uint16", "uint32", "uint64", *_HALF, *_FLOATS,
        },
        "uint8": {
            "int16", "int32", "int64", "uint16", "uint32", "uint64", *_HALF, *_FLOATS,
        },
        "int8": {"int16", "int32", "int64", *_HALF, *_FLOATS},
        "int16": {"int32", "int64", *_FLOATS},
        "uint16": {"int32", "int64", "uint32", "uint64", *_FLOATS},
        "int32": {"int64", "float64"},
        "uint32": {"int64", "uint64", "float64"},
        "float8_e4m3fn": {*_HALF, *_FLOATS},
        "float8_e4m3fnuz": {*_HALF, *_FLOATS},
        "float8_e5m2": {*_HALF, *_FLOATS},
        "float8_e5m2fnuz": {*_HALF, *_FLOATS},
        "float8_e8m0fnu": {"bfloat16", *_FLOATS},
        "float16": {*_FLOATS},
        "bfloat16": {*_FLOATS},
        "float32": {"float64"},
        "complex32": {"complex64", "complex128"},
        "complex64": {"complex128"},
    }.items()
}  # fmt: skip
"""Which changes of dtype keep every value: ``torch.can_cast`` and ``torch.promote_types`` both allow int64 to float32,
which loses bits."""


def is_exact_cast(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target in EXACT_CASTS.get(source, frozenset())
