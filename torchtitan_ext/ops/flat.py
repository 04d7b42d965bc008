"""Lists of tensors as one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_ext.op_library import DifferentiableOp, call, listed, register_fake, register_in_place

DEFAULT_ALIGNMENT = 64
"""Bytes. A cache line: no two tensors of a flat buffer share one, and a view of any dtype fits."""


def flat_offsets(tensors: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT) -> list[int]:
    """Where each tensor begins in their flat buffer, in bytes, and behind the last one the size of the buffer."""
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"flat buffer: alignment is {alignment}, expected a power of two of at most {2**20} bytes")
    offsets, end = [], 0
    for tensor in listed("flat_offsets", "tensors", tensors):
        offsets.append((end + alignment - 1) // alignment * alignment)
        end = offsets[-1] + tensor.numel() * tensor.element_size()
    return [*offsets, end]


def flatten_tensors(
    tensors: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Copies tensors into one new flat buffer, one behind the other, with zeros where alignment leaves gaps.

    Args:
        tensors: On one device; any shapes and strides.
        alignment: Each tensor begins at a multiple of it; a power of two, in bytes.
        dtype: ``torch.uint8`` for the bytes of tensors of any dtypes: not differentiable. Or the dtype
            that all tensors have: differentiable, and with an alignment of one element the concatenation.

    Returns:
        A 1-d tensor of ``dtype``; ``flat_offsets`` says what lies where, ``flat_views`` gives it shape again.
    """
    given = listed("flatten_tensors", "tensors", tensors)
    return _FLATTEN_TENSORS((given, alignment, dtype)) if given else torch.empty(0, dtype=dtype)


@register_fake("flatten_tensors")
def _(tensors: Sequence[Tensor], alignment: int, dtype: torch.dtype) -> Tensor:
    num_bytes = flat_offsets(tensors, alignment=alignment)[-1]
    return tensors[0].new_empty(num_bytes // dtype.itemsize, dtype=dtype)


def _setup_flatten_tensors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.alignment, _ = inputs
    ctx.like = [torch.empty_like(tensor, device="meta") for tensor in tensors]


def _backward_flatten_tensors(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None]:
    return flat_views(grad.contiguous(), ctx.like, alignment=ctx.alignment), None, None


_FLATTEN_TENSORS = DifferentiableOp("flatten_tensors", _backward_flatten_tensors, setup_context=_setup_flatten_tensors)


def flatten_into_(tensors: Sequence[Tensor], out: Tensor, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
    """As ``flatten_tensors``, into the beginning of an existing buffer; what lies behind the last tensor is unchanged.

    Args:
        tensors: On one device; any shapes and strides. They may not share memory with ``out``.
        out: 1-d, contiguous, uint8 or the dtype of all tensors, at least as long as needed.
        alignment: In bytes.
    """
    given = listed("flatten_into_", "tensors", tensors)
    if given:
        call("flatten_into_", (given, alignment, out))


register_in_place("flatten_into_", 2)


def unflatten_tensors_(tensors: Sequence[Tensor], flat: Tensor, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
    """Fills tensors, in place, from the beginning of a buffer that ``flatten_tensors`` made of tensors like them.

    Args:
        tensors: The destinations, of any strides. No two of them may share memory.
        flat: 1-d, contiguous, uint8 or the dtype of all tensors.
        alignment: That of the buffer, in bytes.
    """
    given = listed("unflatten_tensors_", "tensors", tensors)
    if given:
        call("unflatten_tensors_", (given, flat, alignment))


register_in_place("unflatten_tensors_", 0)


def flat_views(flat: Tensor, like: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT) -> list[Tensor]:
    """The tensors of a flat buffer as contiguous views into it, with the shapes and dtypes of ``like``."""
    like = listed("flat_views", "like", like)
    offsets = flat_offsets(like, alignment=alignment)
    if offsets[-1] > flat.numel() * flat.element_size():
        raise ValueError(f"flat_views: the buffer has {flat.numel() * flat.element_size()} bytes, needs {offsets[-1]}")
    views = []
    for tensor, offset in zip(like, offsets, strict=False):
        begin = offset // flat.element_size()
        end = begin + tensor.numel() * tensor.element_size() // flat.element_size()
        part = flat[begin:end]
        views.append((part if flat.dtype == tensor.dtype else part.view(tensor.dtype)).view(tensor.shape))
    return views
