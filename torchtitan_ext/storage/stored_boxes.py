"""Boxes of tensors that lie in files with strides of any kind: what a reader of runs takes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.storage.checkpoint_files import StoredTensor, row_major_strides

Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, and from where."""


def add_box(
    runs: _core.RunReader, file: int, stored: StoredTensor, offsets: Sequence[int], place: torch.Tensor
) -> list[Copy]:
    """Adds the box of a stored tensor that begins at some offsets to what is to be read, into memory of its size.

    Args:
        place: Strided, on the CPU, of the stored dtype; no two of its elements share memory.

    Returns:
        Copies that complete it when it has been read, in their order: of elements that the file has once for several.

    Raises:
        DamagedCheckpointError: The tensor has another number of dims.
        FormatError: The box does not lie in the tensor, or the tensor not in the file.
    """
    if len(stored.sizes) != place.dim():
        raise DamagedCheckpointError(
            f"a tensor of sizes {list(stored.sizes)} lies at byte {stored.data_offset} of its file, expected one of "
            f"{place.dim()} dims"
        )
    if stored.strides == row_major_strides(stored.sizes):  # as nearly all are, of which there may be very many
        _add(runs, file, stored, offsets, place)
        return []
    copies = []
    for dim, stride in enumerate(stored.strides):
        if stride == 0 and place.shape[dim] > 1:
            first = place.narrow(dim, 0, 1)
            copies.append((place.narrow(dim, 1, place.shape[dim] - 1), first))
            place = first
    for begins, sizes in boxes_in_file_order(place.shape, stored.strides):
        part_offsets = [offset + begin for offset, begin in zip(offsets, begins, strict=True)]
        _add(runs, file, stored, part_offsets, local_view(place, begins, sizes))
    return copies[::-1]


def _add(runs: _core.RunReader, file: int, stored: StoredTensor, offsets: Sequence[int], place: torch.Tensor) -> None:
    address, item_bytes = place.data_ptr(), place.element_size()
    sizes, strides = stored.sizes, stored.strides
    runs.add_box(file, stored.data_offset, item_bytes, sizes, strides, offsets, place.shape, address, place.stride())


def boxes_in_file_order(
    sizes: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that are one box, and of which each is in file order: a stride steps over all smaller
    ones. Most often it is the box itself; elements that share bytes, or lie between each other, are rare.

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
            return dim if inner is None or -(-extent // stride) >= size else inner
        extent += stride * (size - 1)
        inner = dim
    return None
