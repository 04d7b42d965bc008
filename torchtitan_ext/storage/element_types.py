"""The dtypes whose elements are plain memory, by their names in torch. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchtitan_ext import _core

ELEMENT_TYPES = _core.element_types()
ITEM_BYTES = {name: element_type.item_bytes for name, element_type in ELEMENT_TYPES.items()}


def num_bytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """The size in bytes of a tensor's elements; the dtype is a key of ``ITEM_BYTES``."""
    return math.prod(sizes) * ITEM_BYTES[dtype]
