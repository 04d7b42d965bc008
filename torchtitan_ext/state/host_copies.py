"""Copies of an accelerator's tensors on the host: many tensors in one transfer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.layout.dtensor import as_bytes, local_view
from torchtitan_ext.layout.layout import aligned

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


def _copied(names: list[str], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    plain = [tensors[name].resolve_conj().resolve_neg() for name in names]
    flat = torch.empty(ops.flat_offsets(plain)[-1], dtype=torch.uint8, device="cpu")
    flatten_to_host_(plain, flat)
    return list(zip(names, ops.flat_views(flat, plain), strict=True))


def packed_on_device(tensor: Tensor) -> Tensor:
    """A contiguous copy of a strided tensor of an accelerator, made by one kernel; any other tensor itself."""
    if type(tensor) is not Tensor or tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    if tensor.is_conj() or tensor.is_neg() or not takes_operators(tensor.device):
        return tensor
    with torch.no_grad():
        return ops.flatten_tensors([tensor]).view(tensor.dtype).view(tensor.shape)


@torch.no_grad()
def flatten_to_host_(tensors: Sequence[Tensor], out: Tensor) -> None:
    """As ``ops.flatten_into_``, into host memory, with tensors of any devices. Returns when all bytes are there.

    An accelerator copies on a stream of its own, behind what its current stream has to do at the call. Thousands of
    small tensors are a few copies where those of one device stand one behind the other.

    Args:
        tensors: Plain memory, any strides, neither conjugated nor negated.
        out: As there; pinned, or copies are slow. What alignment leaves free may be unchanged.
    """
    groups = [list(group) for _, group in itertools.groupby(tensors, key=attrgetter("device"))]
    for group in groups:
        if group[0].is_cpu:
            ops.flatten_into_(group, out)
        elif takes_operators(group[0].device):
            _copy_by_buckets(group, out)
        else:
            for view, tensor in zip(ops.flat_views(out, group), group, strict=True):
                view.copy_(tensor)
        if group is not groups[-1]:
            out = out[aligned(ops.flat_offsets(group)[-1]) :]


def _copy_by_buckets(tensors: Sequence[Tensor], out: Tensor) -> None:
    """``flatten_to_host_`` of one accelerator.

    One bucket is enough: to fill it takes a small part of the time of its copy to the host.
    """
    device = tensors[0].device
    parts = list(_flat_parts(tensors))
    bucket_bytes = max((part.end - part.begin for part in parts if not part.is_contiguous), default=0)
    bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)  # the current stream can use its memory again
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    try:
        with stream:
            for part in parts:
                if part.is_contiguous:
                    there = as_bytes(part.tensors[0])
                else:
                    ops.flatten_into_(part.tensors, bucket)
                    there = bucket[: part.end - part.begin]
                out[part.begin : part.end].copy_(there, non_blocking=True)
    finally:
        stream.record_event().synchronize()  # after an error too, which gives the memory of both sides back


@dataclass(frozen=True)
class _FlatPart:
    """A part of a flat buffer, in bytes: itself the flat buffer of whole tensors, or of a box of one."""

    begin: int
    end: int
    tensors: list[Tensor]

    @property
    def is_contiguous(self) -> bool:
        return len(self.tensors) == 1 and self.tensors[0].is_contiguous()


def _flat_parts(tensors: Sequence[Tensor]) -> Iterator[_FlatPart]:
    """The flat buffer of tensors in parts: of at most ``BUCKET_BYTES``, or of one contiguous tensor."""
    begin = end = 0
    group: list[Tensor] = []
    for offset, tensor in zip(ops.flat_offsets(tensors), tensors, strict=False):
        if group and offset + tensor.nbytes > begin + BUCKET_BYTES:
            yield _FlatPart(begin, end, group)
            group = []
        if tensor.nbytes <= BUCKET_BYTES:
            begin = begin if group else offset
            end = offset + tensor.nbytes
            group.append(tensor)
        elif tensor.is_contiguous():
            yield _FlatPart(offset, offset + tensor.nbytes, [tensor])
        else:
            for _, box in row_major_boxes(tensor, BUCKET_BYTES // tensor.element_size()):
                yield _FlatPart(offset, offset + box.nbytes, [box])
                offset += box.nbytes
    if group:
        yield _FlatPart(begin, end, group)


def row_major_boxes(tensor: Tensor, max_elements: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cuts a tensor into boxes (offsets, view) of at most so many elements, row-major one behind the other."""
    for offsets, sizes in _core.BoxParts((0,) * tensor.dim(), tensor.shape, max_elements):
        yield offsets, local_view(tensor, offsets, sizes)
