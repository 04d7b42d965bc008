"""Plain tensors whose attributes say which boxes of a global tensor they hold: ``CheckpointableTensor`` of torch 2.14.

Any ``torch.Tensor`` with the four attributes is one, whatever the version of torch, which need not know the protocol
(``torch/distributed/checkpoint/protocol.py``). Example: the second of two ranks holds rows 4 to 7 of an (8, 2) tensor,
behind one row of padding:

    tensor = torch.empty(5, 2)
    tensor.global_shape = (8, 2)
    tensor.global_offsets = ((4, 0),)   # of each box, in the global tensor
    tensor.local_offsets = ((1, 0),)    # the same box in this tensor; what no box holds is padding
    tensor.local_sizes = ((4, 2),)

A tensor that has only some of them is a plain tensor, as in stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_ext.dcp_private import ShardedTensor
from torchtitan_ext.layout.layout import Chunk, num_elements

_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_own_boxes(value: Any) -> bool:
    """Whether a value is a tensor with the four attributes, and none that DCP describes in another way."""
    # Most tensors lack the first attribute.
    return (
        hasattr(value, _ATTRIBUTES[0])
        and isinstance(value, torch.Tensor)
        and all(hasattr(value, name) for name in _ATTRIBUTES)
        and not isinstance(value, (DTensor, ShardedTensor))
        and not hasattr(value, "__create_chunk_list__")
    )


def own_boxes(tensor: Any) -> tuple[tuple[int, ...], list[Chunk]]:
    """The global shape, and the boxes with elements that a tensor with the four attributes holds.

    Raises:
        ValueError: The attributes do not fit each other, or the tensor.
    """
    shape = _numbers("global_shape", tensor.global_shape)
    lists = {name: _entries(name, getattr(tensor, name)) for name in _ATTRIBUTES[1:]}
    counts = {name: len(entries) for name, entries in lists.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(f"{found}; each needs one entry per box")
    if len(shape) != tensor.dim():
        raise ValueError(
            f"global_shape is {shape}, its local tensor has shape {tuple(tensor.shape)}: other numbers of dims"
        )
    chunks = []
    for offsets, local_offsets, sizes in zip(*lists.values(), strict=True):
        _check_inside("global_offsets", offsets, sizes, shape, "global_shape")
        _check_inside("local_offsets", local_offsets, sizes, tuple(tensor.shape), "its local tensor of shape")
        if num_elements(sizes) > 0:
            chunks.append(Chunk(offsets, sizes, local_offsets))
    return shape, chunks


def why_not_own_boxes(tensor: torch.Tensor) -> str | None:
    """Why the four attributes of a tensor make no sense; ``None`` if they do, or if it has none."""
    try:
        if has_own_boxes(tensor):
            own_boxes(tensor)
    except ValueError as error:
        where = f"rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else "this rank"
        return f"describes its own boxes, and on {where} these make no sense: {error}; correct these attributes"
    return None


def keep_own_boxes(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made``, a tensor of the same shape, which gets the four attributes of ``tensor`` if that has them."""
    if has_own_boxes(tensor):
        for name in _ATTRIBUTES:
            setattr(made, name, getattr(tensor, name))
    return made


def own_box_values(tensor: Any) -> list[Any]:
    """The attributes, which must make sense, as plain lists of ints: global shape and boxes."""
    return box_values(*own_boxes(tensor))


def box_values(shape: Sequence[int], chunks: Sequence[Chunk]) -> list[Any]:
    """A global shape and boxes of it as plain lists of ints."""
    return [list(shape), [[list(values) for values in chunk] for chunk in chunks]]


def set_own_boxes(tensor: Any, values: Sequence[Any]) -> None:
    """Gives a tensor the attributes that ``box_values`` made lists of."""
    shape, chunks = values
    tensor.global_shape = tuple(shape)
    boxes = [Chunk(*map(tuple, chunk)) for chunk in chunks]
    tensor.global_offsets = tuple(box.offsets for box in boxes)
    tensor.local_offsets = tuple(box.local_offsets for box in boxes)
    tensor.local_sizes = tuple(box.sizes for box in boxes)


def _entries(name: str, value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} is {value!r}, expected one tuple of ints per box")
    return [_numbers(f"{name}[{position}]", entry) for position, entry in enumerate(value)]


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(index(number) for number in value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected a tuple of ints") from None


def _check_inside(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], whole: str
) -> None:
    is_inside = len(offsets) == len(sizes) == len(shape) and all(
        begin >= 0 and size >= 0 and begin + size <= end for begin, size, end in zip(offsets, sizes, shape, strict=True)
    )
    if not is_inside:
        raise ValueError(f"the box at {name} {offsets} of local_sizes {sizes} is not inside {whole} {shape}")
