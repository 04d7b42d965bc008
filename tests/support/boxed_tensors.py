"""Tensors with boxes of their own (``CheckpointableTensor``), cut out of a whole one, with padding around each box."""

from collections.abc import Sequence
from typing import Any

import torch
from reference import index_tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]

PADDING = 1  # rows before, between and behind the boxes of a local tensor

# Per case the global shape, and the boxes (offsets, sizes) of each rank.
CASES: dict[str, tuple[tuple[int, ...], list[list[Box]]]] = {
    "halves": ((8,), [[((0,), (4,))], [((4,), (4,))]]),
    "several boxes": (
        (9, 5),
        [[((0, 0), (2, 5)), ((6, 0), (3, 2))], [((6, 2), (3, 3)), ((2, 0), (4, 5))]],
    ),
    "a rank without boxes": ((7, 3), [[((0, 0), (5, 3))], [], [((5, 0), (2, 3))]]),
    "an empty box at the place of another": ((4,), [[((0,), (0,)), ((0,), (3,))], [((3,), (1,)), ((4,), (0,))]]),
    "replicas": ((4, 2), [[((0, 0), (4, 2))], [((0, 0), (4, 2))]]),
    "one box twice": ((6,), [[((0,), (4,))], [((0,), (4,)), ((4,), (2,))]]),
    "no dims": ((), [[((), ())], [((), ())]]),
    "no elements": ((0, 3), [[((0, 0), (0, 3))], []]),
}


def boxed(local: torch.Tensor, shape: Sequence[int], boxes: Sequence[tuple[Any, Any, Any]]) -> Any:
    """The tensor with the attributes; a box is its offsets, its offsets in the local tensor, its sizes."""
    tensor: Any = local
    tensor.global_shape = tuple(shape)
    tensor.global_offsets = tuple(offsets for offsets, _, _ in boxes)
    tensor.local_offsets = tuple(local_offsets for _, local_offsets, _ in boxes)
    tensor.local_sizes = tuple(sizes for _, _, sizes in boxes)
    return tensor


def cut(whole: torch.Tensor, boxes: Sequence[Box]) -> Any:
    """One rank's tensor, filled from the whole one; padding is what ``poisoned`` makes."""
    if whole.dim() == 0:
        return boxed(whole.clone(), (), [((), (), ()) for _ in boxes])
    rows = PADDING + sum(sizes[0] + PADDING for _, sizes in boxes)
    local = poisoned(torch.empty((rows, *whole.shape[1:]), dtype=whole.dtype))
    placed, row = [], PADDING
    for offsets, sizes in boxes:
        placed.append((offsets, (row, *(0 for _ in sizes[1:])), sizes))
        row += sizes[0] + PADDING
    tensor = boxed(local, whole.shape, placed)
    for (offsets, sizes), part in zip(boxes, parts(tensor), strict=True):
        part.copy_(whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])
    return tensor


def parts(tensor: Any) -> list[torch.Tensor]:
    """The boxes of a tensor, as views of it."""
    return [
        tensor.detach()[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        for offsets, sizes in zip(tensor.local_offsets, tensor.local_sizes, strict=True)
    ]


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, with ones in every bit."""
    tensor.view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else 255)
    return tensor


def whole_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of which neighbours differ, in every dtype."""
    numbers = index_tensor(shape)
    return numbers % 2 == 0 if dtype == torch.bool else (numbers % 13).to(dtype)


def states_of(case: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The whole tensor of a case, and of each rank a state with its part as ``w``."""
    shape, boxes_of_ranks = CASES[case]
    whole = whole_of(shape, dtype)
    return whole, [{"w": cut(whole, boxes)} for boxes in boxes_of_ranks]
