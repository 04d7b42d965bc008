"""Moves boxes of tensors from every rank of a group to every other, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from torchtitan_ext.op_library import (
    bump_version_of,
    call_collective,
    check_full_abi,
    classes,
    errors_of,
    keep_out_of_cuda_graphs,
    kernels,
    listed,
    register_fake,
)
from torchtitan_ext.ops.broadcast import DEFAULT_BUCKET_BYTES

REFUSED = -1
"""The digest by which a rank says that it takes no part; the call raises on all ranks then."""

_NUMBERS = {
    **dict(enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32))),
    **{7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool},
    **{15: torch.bfloat16, 23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 25: torch.float8_e5m2fnuz},
    **{26: torch.float8_e4m3fnuz, 27: torch.uint16, 28: torch.uint32, 29: torch.uint64, 44: torch.float8_e8m0fnu},
}
_NUMBER_OF = {dtype: number for number, dtype in _NUMBERS.items()}


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype in a table of boxes (``at::ScalarType``). Raises ValueError for dtypes without casts."""
    if dtype not in _NUMBER_OF:
        raise ValueError(f"exchange_runs_: got {dtype}, expected a dtype to which torch converts")
    return _NUMBER_OF[dtype]


def numbered_dtype(number: int) -> torch.dtype:
    """The dtype of a number that ``dtype_number`` gave."""
    return _NUMBERS[number]


def exchange_runs_(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    sends: Tensor,
    receives: Tensor,
    *,
    group_name: str,
    digest: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout_seconds: float = 0.0,
) -> None:
    """Sends boxes of this rank's tensors to other ranks and receives boxes of theirs, bit for bit. Collective.

    A table of boxes has for each ``peer, tensor, dtype, num_dims``, its offsets and its sizes, in elements of the
    rank's own tensor; boxes are sorted by peer. The boxes that one rank has for another travel in their order, and the
    other expects as many of the same bytes, of any shape and dtype. A rank's boxes for itself are copied; there both
    shapes must be equal. ``dtype`` is -1, or in ``sends`` ``dtype_number`` of the dtype to which the sender
    converts the elements first.

    Before anything moves, ranks compare what they are about to do. Large boxes that are contiguous travel from memory
    and to memory; others go through kept buckets, of which three are in use.

    Args:
        sources: What is sent, of any shapes, dtypes and strides. Sources and targets are on one device.
        targets: What is received into. No two of them may share memory, nor one with a source.
        sends: The boxes to be sent: 1-d, int64, on the CPU.
        receives: The boxes to be received, which may not overlap, in the same form.
        group_name: ``ProcessGroup.group_name``. Peers are ranks of this group. Every rank of it takes part, a rank
            that neither sends nor receives with empty lists.
        digest: All ranks must pass the same; -1 (``REFUSED``) is a refusal.
        bucket_bytes: Size of a bucket. All ranks must pass the same.
        timeout_seconds: How long to wait for another rank, where the group can wait for a while; 0 is as long as the
            group waits.

    Raises:
        ValueError: This rank or another refuses its arguments, or ranks disagree. On all ranks; nothing was moved.
        torch.distributed.DistBackendError: A rank is lost, or the transfer failed. Targets may be part-written, except
            where the text says that nothing was moved.
    """
    try:
        given = (
            listed("exchange_runs_", "sources", sources),
            listed("exchange_runs_", "targets", targets),
            *(sends, receives),
        )
        if not torch.compiler.is_compiling():
            _check_types(sources=given[0], targets=given[1], sends=[sends], receives=[receives])
    except (TypeError, ValueError):
        _refuse(group_name, bucket_bytes, timeout_seconds)
        raise
    call_collective("exchange_runs_", (*given, group_name, digest, bucket_bytes, float(timeout_seconds)))


@register_fake("exchange_runs_")
def _(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    sends: Tensor,
    receives: Tensor,
    group_name: str,
    digest: int,
    bucket_bytes: int,
    timeout_seconds: float,
) -> None:
    """Fake tensors of tracing pass. A real meta tensor is refused: it would be skipped silently."""
    for name, tensors in ("sources", sources), ("targets", targets):
        for index, tensor in enumerate(tensors):
            if type(tensor) is Tensor and tensor.is_meta:
                _refuse(group_name, bucket_bytes, timeout_seconds)
                raise ValueError(f"exchange_runs_: {name}[{index}] is on the meta device; give it memory first")


bump_version_of("exchange_runs_", 1)
keep_out_of_cuda_graphs("exchange_runs_")  # ranks agree over the host


class PlannedExchange:
    """An exchange that is checked and planned once, and runs many times with what the tensors hold then.

    Of thousands of small tensors checks and plan take longer than the transfer. Not collective to make; the arguments
    are those of ``exchange_runs_``, without lazily conjugated or negated views. It keeps the tensors, which must not
    get other memory meanwhile.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        sends: Tensor,
        receives: Tensor,
        *,
        group_name: str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        check_full_abi()
        tensors = (listed("PlannedExchange", "sources", sources), listed("PlannedExchange", "targets", targets))
        self._native = classes.PlannedExchange(*tensors, sends, receives, group_name, bucket_bytes)

    def run(self, *, digest: int = 0, timeout_seconds: float = 0.0) -> None:
        """Collective; raises what ``exchange_runs_`` raises."""
        with errors_of("exchange_runs_"):
            self._native.run(digest, float(timeout_seconds))


def _check_types(**arguments: Sequence[Tensor]) -> None:
    """What never reaches the kernel, where it would keep the other ranks waiting."""
    for name, tensors in arguments.items():
        for kind in {type(tensor) for tensor in tensors}:
            if not issubclass(kind, Tensor):
                raise ValueError(f"exchange_runs_: got a {kind.__name__} in {name}, expected a tensor")
            is_plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
            if not is_plain and not issubclass(kind, FakeTensor):
                raise ValueError(f"exchange_runs_: got a {kind.__name__} in {name}; pass the rank's own plain tensor")


def _refuse(group_name: str, bucket_bytes: int, timeout_seconds: float) -> None:
    """Tells the other ranks."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    with contextlib.suppress(Exception):  # the caller has an error to raise
        kernels.exchange_runs_([], [], nothing, nothing, group_name, REFUSED, bucket_bytes, timeout_seconds)
