"""Buckets in which tensors of an accelerator travel: many tensors are one copy between the device and the host.

A bucket is a flat buffer on both sides. On the device our operators fill it and take it apart, so that strided boxes
travel like whole tensors. The host has two buffers, pinned, which take turns: while one is copied the other is hashed
and written, or read and verified. All work of the device goes to its current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.layout.layout import aligned
from torchtitan_ext.state.host_copies import BUCKET_BYTES, row_major_boxes, takes_operators
from torchtitan_ext.storage.raw_tensor import converted

NUM_HOST_BUFFERS = 2


def bucket_bytes_of(num_bytes: int) -> int:
    """The size of the buckets for tensors of so many bytes: a power of two, so that there is room for gaps."""
    return min(BUCKET_BYTES, max(ops.DEFAULT_ALIGNMENT, 1 << (num_bytes - 1).bit_length()))


@dataclass
class _OutgoingBucket:
    """Tensors of one device, and what is to be done, in this order, once their bytes are at an address of the host."""

    tensors: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0
    steps: list[Callable[[int], object]] = field(default_factory=list)
    event: torch.Event | None = None


class OutgoingBuckets:
    """Brings tensors of accelerators to the host: ``add`` them, then call ``finish``.

    Args:
        bucket_bytes: The size of a bucket.
        on_bucket: Called when all functions have been called for the bytes of a bucket. Behind it they are gone.
    """

    def __init__(self, bucket_bytes: int, on_bucket: Callable[[], object]) -> None:
        self._bucket_bytes = bucket_bytes
        self._on_bucket = on_bucket
        self._buffers = _Buffers(bucket_bytes)
        self._filled = _OutgoingBucket()
        self._started: tuple[_OutgoingBucket, Tensor] | None = None

    def add(self, tensor: Tensor, use: Callable[[int, int], object]) -> None:
        """Calls ``use(address, num_bytes)``, now or later, for all bytes of a tensor in row-major order.

        Args:
            tensor: Plain memory of an accelerator, any strides. It must not change until ``finish`` returns.
        """
        for _, part in row_major_boxes(tensor, self._bucket_bytes // tensor.element_size()):
            begin = aligned(self._filled.num_bytes)
            first = self._filled.tensors[0] if self._filled.tensors else part
            if begin + part.nbytes > self._bucket_bytes or part.device != first.device:
                self._start()
                begin = 0
            self._filled.tensors.append(part)
            self._filled.num_bytes = begin + part.nbytes
            self._filled.steps.append(functools.partial(_use_part, use, begin, part.nbytes))

    def then(self, call: Callable[[], object]) -> None:
        """Calls a function after those for the tensors added so far."""
        if self._started is None and not self._filled.steps:
            call()
        else:
            self._filled.steps.append(lambda _: call())

    def finish(self) -> None:
        self._start()
        self._finish_started()

    def _start(self) -> None:
        """Starts the copy of the filled bucket, and finishes the one before meanwhile."""
        bucket, self._filled = self._filled, _OutgoingBucket()
        if not bucket.steps:
            self._finish_started()
            return
        host = self._buffers.next_host()
        if bucket.num_bytes > 0:
            self._copy(bucket, host)
        self._finish_started()
        self._started = (bucket, host)

    @torch.no_grad()
    def _copy(self, bucket: _OutgoingBucket, host: Tensor) -> None:
        device = bucket.tensors[0].device
        is_late = self._buffers.is_pinned_for(device)
        if len(bucket.tensors) == 1 and bucket.tensors[0].is_contiguous():
            host[: bucket.num_bytes].copy_(as_bytes(bucket.tensors[0]), non_blocking=is_late)
        elif takes_operators(device):
            flat = self._buffers.on_device(device)
            ops.flatten_into_(bucket.tensors, flat)
            host[: bucket.num_bytes].copy_(flat[: bucket.num_bytes], non_blocking=is_late)
        else:
            for view, tensor in zip(ops.flat_views(host, bucket.tensors), bucket.tensors, strict=True):
                view.copy_(tensor, non_blocking=is_late)
        bucket.event = _recorded(device) if is_late else None

    def _finish_started(self) -> None:
        if self._started is None:
            return
        (bucket, host), self._started = self._started, None
        if bucket.event is not None:
            bucket.event.synchronize()
        for step in bucket.steps:
            step(host.data_ptr())
        self._on_bucket()


def _use_part(use: Callable[[int, int], object], begin: int, num_bytes: int, address: int) -> None:
    use(address + begin, num_bytes)


class _Conversion(NamedTuple):
    """A target whose elements are cast or scaled on the device, and where they and their scales begin, in bytes."""

    target: Tensor
    begin: int
    dtypes: Sequence[torch.dtype]
    scales: tuple[int, torch.dtype] | None


@dataclass
class _IncomingBucket:
    """What has been placed in a buffer of the host.

    Attributes:
        front: The end of the flat buffer of ``targets``, in bytes.
        back: Where what is to be converted begins. It is no part of the flat buffer and fills its place from behind.
    """

    host: Tensor
    device: torch.device
    back: int
    front: int = 0
    targets: list[Tensor] = field(default_factory=list)
    conversions: list[_Conversion] = field(default_factory=list)

    def place(
        self, target: Tensor, dtypes: Sequence[torch.dtype], scale_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None] | None:
        if target.device != self.device:
            return None
        if tuple(dtypes) == (target.dtype,) and scale_dtype is None:
            begin = aligned(self.front)
            if begin + target.nbytes > self.back:
                return None
            self.targets.append(target)
            self.front = begin + target.nbytes
            return _typed(self.host, begin, target, target.dtype), None
        begin = _aligned_before(self.back - target.numel() * dtypes[0].itemsize)
        scales = None
        if scale_dtype is not None:
            scales = (_aligned_before(begin - target.numel() * scale_dtype.itemsize), scale_dtype)
        back = begin if scales is None else scales[0]
        if back < self.front:
            return None
        self.conversions.append(_Conversion(target, begin, dtypes, scales))
        self.back = back
        return _typed(self.host, begin, target, dtypes[0]), scales and _typed(self.host, scales[0], target, scales[1])


def _aligned_before(byte: int) -> int:
    return byte // ops.DEFAULT_ALIGNMENT * ops.DEFAULT_ALIGNMENT


def _typed(flat: Tensor, begin: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies at a byte of a flat buffer, as elements of a dtype, in the shape of another tensor."""
    return flat[begin : begin + like.numel() * dtype.itemsize].view(dtype).view(like.shape)


class IncomingBuckets:
    """Fills tensors of accelerators from the host: ``place`` them, write their bytes, ``send``; at last ``finish``.

    Args:
        bucket_bytes: The size of a bucket.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._buffers = _Buffers(bucket_bytes)
        self._events: dict[int, torch.Event] = {}  # of the last copy from each buffer of the host, by its address
        self._bucket: _IncomingBucket | None = None

    def place(
        self, target: Tensor, dtypes: Sequence[torch.dtype], scale_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Where on the host the elements of a target are to be written, and their scales, before ``send``.

        Args:
            target: Of an accelerator that takes operators, any strides. What is written for it has room in a bucket.
            dtypes: Of the elements that will be written, and to which they are cast on the device in turn.
            scale_dtype: Of what they are multiplied by, if anything; see ``converted``.

        Returns:
            Contiguous tensors of the target's shape; ``None`` where the bucket has no room for it: ``send`` it first.
        """
        if self._bucket is None:
            host = self._buffers.next_host()
            if (event := self._events.pop(host.data_ptr(), None)) is not None:
                event.synchronize()
            self._bucket = _IncomingBucket(host, target.device, back=self.bucket_bytes)
        return self._bucket.place(target, dtypes, scale_dtype)

    @torch.no_grad()
    def send(self) -> None:
        """Starts to fill the targets placed since the last call."""
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            return
        is_late = self._buffers.is_pinned_for(bucket.device)
        if len(bucket.targets) == 1 and bucket.targets[0].is_contiguous() and not bucket.conversions:
            as_bytes(bucket.targets[0]).copy_(bucket.host[: bucket.front], non_blocking=is_late)
        else:
            flat = self._buffers.on_device(bucket.device)
            for begin, end in ((0, bucket.front), (bucket.back, self.bucket_bytes)):
                if begin < end:
                    flat[begin:end].copy_(bucket.host[begin:end], non_blocking=is_late)
            _unflatten(bucket.targets, flat)
            for target, begin, dtypes, scales in bucket.conversions:
                values = _typed(flat, begin, target, dtypes[0])
                factors = scales and _typed(flat, scales[0], target, scales[1])
                target.copy_(converted(values, factors, dtypes[1:], target.dtype))
        if is_late:
            self._events[bucket.host.data_ptr()] = _recorded(bucket.device)

    def finish(self) -> None:
        """Waits until all that was sent is there."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()


def _unflatten(targets: Sequence[Tensor], flat: Tensor) -> None:
    if not targets:
        return
    try:
        ops.unflatten_tensors_(targets, flat)
    except ValueError:  # tied weights share memory: one after the other
        for target, values in zip(targets, ops.flat_views(flat, targets), strict=True):
            target.copy_(values)


class _Buffers:
    """The memory of buckets: made when it is first needed, then kept."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._host: list[Tensor] = []
        self._turn = 0
        self._flat: dict[torch.device, Tensor] = {}

    def next_host(self) -> Tensor:
        if len(self._host) < NUM_HOST_BUFFERS:
            pin_memory = torch.accelerator.is_available()
            self._host.append(torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory))
        self._turn += 1
        return self._host[(self._turn - 1) % NUM_HOST_BUFFERS]

    def is_pinned_for(self, device: torch.device) -> bool:
        """Whether copies between the host's buffers and a device may go on behind the caller's back."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and accelerator.type == device.type and self._host[0].is_pinned()

    def on_device(self, device: torch.device) -> Tensor:
        if device not in self._flat:
            self._flat[device] = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        return self._flat[device]


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
