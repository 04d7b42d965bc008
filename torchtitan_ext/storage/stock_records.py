"""Where the elements of tensors lie in files of stock DCP, whose records are zip archives of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import StoredTensor, shown
from torchtitan_ext.storage.element_types import ITEM_BYTES, dtype_name_of


def find_stock_tensors(
    path: Path, places: Mapping[int, int], num_threads: int, descriptor: int = -1
) -> dict[int, StoredTensor | None]:
    """The plain tensor in each of some records; ``None`` for records that only ``torch.load`` understands.

    Args:
        path: A data file; for messages only where there is a descriptor.
        places: Length by offset of the records.

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
    for offset, row in zip(places, found, strict=True):
        tensors[offset] = None
        if row is None:
            continue
        storage_class, name, sizes, strides, storage_offset, data_offset, data_bytes = row
        dtype = dtype_name_of(storage_class, name)
        if dtype is None or not is_in_file_order(sizes, strides):
            continue
        data_offset += storage_offset * ITEM_BYTES[dtype]
        tensor = StoredTensor(dtype, sizes, strides, data_offset)
        if storage_offset * ITEM_BYTES[dtype] + extent_bytes(tensor) > data_bytes:
            raise DamagedCheckpointError(
                f"{path}: record at byte {offset}: the tensor needs {extent_bytes(tensor)} bytes, its storage has "
                f"{data_bytes}"
            )
        tensors[offset] = tensor
    return tensors


def extent_bytes(tensor: StoredTensor) -> int:
    """From its first element to behind its last one."""
    if 0 in tensor.sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=True))
    return (last + 1) * ITEM_BYTES[tensor.dtype]


def is_in_file_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each stride steps over all smaller ones; elements that share bytes, or are interleaved, are rare."""
    return _dim_to_cut(sizes, strides) is None


def boxes_in_file_order(
    sizes: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes of which each is in file order, as ``is_in_file_order`` says, and that are one box.

    Args:
        strides: None is 0 of a dim with several elements.

    Example:
        Windows of 4 elements, each 2 behind the last one, have elements in common: of three windows, which have sizes
        (3, 4) and strides (2, 1), the left and the right half become a box each, of sizes (3, 2).
    """
    dim = _dim_to_cut(sizes, strides)
    if dim is None:
        yield (0,) * len(sizes), tuple(sizes)
        return
    half = sizes[dim] // 2
    for begin, size in ((0, half), (half, sizes[dim] - half)):
        part = (*sizes[:dim], size, *sizes[dim + 1 :])
        for offsets, part_sizes in boxes_in_file_order(part, strides):
            yield (*offsets[:dim], begin + offsets[dim], *offsets[dim + 1 :]), part_sizes


def _dim_to_cut(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Where to halve a box, so that few halves are needed until all are in file order; ``None`` where it is."""
    extent, inner = 1, None
    for stride, size, dim in sorted(zip(strides, sizes, range(len(sizes)), strict=True)):
        if size <= 1:
            continue
        if stride < extent:
            # What lies inside is cut until it fits into one step of this dim, or this dim until it makes no step.
            return dim if inner is None or -(-extent // max(stride, 1)) >= size else inner
        extent += stride * (size - 1)
        inner = dim
    return None
