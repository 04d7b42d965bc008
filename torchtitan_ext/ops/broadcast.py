"""Fills lists of tensors on every rank with those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchtitan_ext.op_library import bump_version_of, call_collective, keep_out_of_cuda_graphs, listed, register_fake

DEFAULT_BUCKET_BYTES = 32 << 20
"""Large buckets make few messages, each long enough to hide its copies. On 4 gloo processes, 341 MB in 300 tensors take
2.1, 1.3, 1.2 and 1.1 times the limit with buckets of 1, 8, 16 and 32 MiB; five dtypes 2.3, 1.4, 1.3 and 1.2
(benchmarks/bench_sync.py). A broadcast needs the extra memory of three buckets, or less for small messages."""


def broadcast_coalesced_(
    tensors: Sequence[Tensor], group_name: str, *, src: int = 0, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Fills tensors on every rank of a process group with the bits that one rank has, in place. Collective.

    Large tensors travel from memory to memory; small ones, of whatever dtype, and those that are not contiguous share
    kept buckets, of which at most three are in use. Only local checks are made: ranks that pass other sizes, another
    order, source or bucket size hang or mix up values. ``torchtitan_ext.sync.broadcast_tensors`` has ranks agree first.

    Args:
        tensors: On one device, of any shapes and strides, in the same order on every rank; empty ones are skipped. No
            two of them may share memory.
        group_name: ``ProcessGroup.group_name``.
        src: Rank of the source, counted in the group.
        bucket_bytes: Largest message, and size of a bucket.

    Raises:
        ValueError: A tensor cannot be received into (sparse, expanded, meta, overlapping), or ``src`` is out of range.
        RuntimeError: The transfer failed; tensors may be part-written.
    """
    given = listed("broadcast_coalesced_", "tensors", tensors)
    if given:
        call_collective("broadcast_coalesced_", (given, group_name, src, bucket_bytes))


@dataclass(frozen=True)
class BroadcastCheck:
    """Whether this rank could take part in a broadcast of some tensors.

    Attributes:
        digest: Digest of dtypes and shapes, on which ranks must agree; empty where a tensor is refused.
        positions: Position in the list of the refused tensor, or of two tensors that share memory; else empty.
        reason: Why the tensors at ``positions`` are refused, in words that follow their names; else empty.
    """

    digest: tuple[int, ...]
    positions: tuple[int, ...]
    reason: str


def check_broadcast(tensors: Sequence[Tensor]) -> BroadcastCheck:
    """Makes the local checks of ``broadcast_coalesced_``. It stops at the first tensor that it refuses."""
    given = listed("check_broadcast", "tensors", tensors)
    if not given:
        return BroadcastCheck((), (), "")
    digest, positions, reason = call_collective("check_broadcast", (given,))
    return BroadcastCheck(tuple(digest), tuple(positions), reason)


@register_fake("broadcast_coalesced_")
def _(tensors: Sequence[Tensor], group_name: str, src: int, bucket_bytes: int) -> None:
    _refuse_meta("broadcast_coalesced_", tensors)


@register_fake("check_broadcast")
def _(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], str]:
    _refuse_meta("check_broadcast", tensors)
    return [0, 0], [], ""


def _refuse_meta(name: str, tensors: Sequence[Tensor]) -> None:
    """Fake tensors of tracing pass. A real meta tensor raises: it would be skipped silently."""
    for index, tensor in enumerate(tensors):
        if type(tensor) is Tensor and tensor.is_meta:
            raise ValueError(f"{name}: tensors[{index}] is on the meta device; give it memory with to_empty() first")


bump_version_of("broadcast_coalesced_", 0)
keep_out_of_cuda_graphs("broadcast_coalesced_")  # it may wait for the host
