"""Where the elements of tensors lie in files of stock DCP, whose records are zip archives of ``torch.save``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import StoredTensor, shown
from torchtitan_ext.storage.element_types import ITEM_BYTES, dtype_name_of, elements_needed


def find_stock_tensors(
    path: Path, places: Mapping[int, int], num_threads: int, descriptor: int = -1
) -> dict[int, StoredTensor | None]:
    """The plain tensor in each of some records; ``None`` for records that only ``torch.load`` understands.

    Args:
        path: The data file; only for messages if there is a descriptor.
        places: Length of each record, by its offset.

    Raises:
        DamagedCheckpointError: A record is no whole archive, or too short for its tensor.
    """
    if not places:
        return {}
    try:
        found = _core.find_tensors(shown(path), list(places.items()), num_threads, descriptor)
    except _core.FormatError as error:
        raise DamagedCheckpointError(str(error)) from None
    tensors: dict[int, StoredTensor | None] = {}
    for offset, one in zip(places, found, strict=True):
        dtype = None if one is None else dtype_name_of(one.storage_class, one.dtype)
        if one is None or dtype is None:
            tensors[offset] = None
            continue
        sizes, strides, item_bytes = one.sizes, one.strides, ITEM_BYTES[dtype]
        num_bytes = elements_needed(sizes, strides, one.storage_offset) * item_bytes
        if num_bytes > one.data_bytes:
            raise DamagedCheckpointError(
                f"{path}: record at byte {offset}: the tensor needs {num_bytes} bytes, its storage has {one.data_bytes}"
            )
        tensors[offset] = StoredTensor(dtype, sizes, strides, one.data_offset + one.storage_offset * item_bytes)
    return tensors
