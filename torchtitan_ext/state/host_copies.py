"""Copies of an accelerator's tensors on the host: many tensors in one transfer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchtitan_ext import ops

BUCKET_BYTES = 64 << 20
"""Of one transfer, at most: it takes milliseconds, beside which its launch is nothing."""


@functools.cache
def takes_operators(device: torch.device) -> bool:
    """Whether our operators run on an accelerator; not so on unknown ones, nor on CUDA in a build without nvcc."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return False
    try:
        ops.flatten_tensors([torch.zeros(1, dtype=torch.uint8, device=device)])
    except (RuntimeError, ValueError):
        return False
    return True


def host_copies(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies of plain tensors of accelerators, grouped by their devices. Others are left out.

    No more than ``BUCKET_BYTES``, or one tensor, are held at a time, unless the caller keeps what it gets.
    """
    of_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if is_plain and not tensor.is_cpu and takes_operators(tensor.device):
            of_device.setdefault(tensor.device, []).append(name)
    for names in of_device.values():
        group: list[str] = []
        num_bytes = 0
        for name in names:
            if group and num_bytes + tensors[name].nbytes > BUCKET_BYTES:
                yield from _copied(group, tensors)
                group, num_bytes = [], 0
            group.append(name)
            num_bytes += tensors[name].nbytes
        yield from _copied(group, tensors)


@torch.no_grad()
def _copied(names: list[str], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    plain = [tensors[name].resolve_conj().resolve_neg() for name in names]
    flat = ops.flatten_tensors(plain).cpu()
    return list(zip(names, ops.flat_views(flat, plain), strict=True))


def packed_on_device(tensor: Tensor) -> Tensor:
    """A contiguous copy of a strided tensor of an accelerator, made by one kernel; any other tensor itself."""
    if type(tensor) is not Tensor or tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    if tensor.is_conj() or tensor.is_neg() or not takes_operators(tensor.device):
        return tensor
    with torch.no_grad():
        return ops.flatten_tensors([tensor]).view(tensor.dtype).view(tensor.shape)
