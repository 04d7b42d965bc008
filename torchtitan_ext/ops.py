"""The operators of the package, typed: shards and lists of tensors, to and from contiguous buffers, and their hashes.

The kernels are ``torch.ops.torchtitan_ext.*`` (schemas: ``csrc/ops/library.cpp``). Here stand the wrappers, and beside
each the fake kernel and the autograd formula, which LibTorch's stable ABI cannot express.

Every op works on CPU and CUDA tensors of any dtype (bytes are moved, never values) and under ``torch.compile``. Bad
arguments raise ValueError, sizes beyond int64 OverflowError, always before the first byte moves. An op whose name ends
in ``_`` changes its argument in place, bumps its version counter and is not differentiable; where its arguments
require grad, call it under ``torch.no_grad()`` or use the form without ``_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_ext.op_library import (
    DifferentiableOp,
    bump_version_of,
    call,
    full_abi_is_missing,
    is_transformed,
    kernels,
)

DEFAULT_ALIGNMENT = 64
"""Bytes. A cache line: no two tensors of a flat buffer share one, and a view of any dtype fits."""


class ChunkLike(Protocol):
    """A box of a global tensor, as ``layout.Chunk``."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def local_offsets(self) -> Sequence[int]: ...


class ShardLike(Protocol):
    """What a rank holds of a tensor, as ``layout.LocalShard``: its shape, and the chunks that tile it."""

    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def chunks(self) -> Sequence[ChunkLike]: ...


# ---- shards ----


def pack_shard(src: Tensor, shard: ShardLike, *, src_offsets: Sequence[int] | None = None) -> Tensor:
    """Copies one rank's shard out of a larger tensor.

    Args:
        src: The global tensor, or a box of it that holds all chunks of the shard; any dtype and strides.
        shard: What the rank holds. Its chunks must tile it.
        src_offsets: Where ``src`` begins in the global tensor, in elements; zeros if left out.

    Returns:
        A new contiguous tensor of shape ``shard.sizes``, with the dtype and device of ``src``. Differentiable.

    Raises:
        ValueError: A chunk reaches out of ``src`` or of the shard, or the chunks do not tile the shard.
    """
    origin = [0] * len(shard.sizes) if src_offsets is None else src_offsets
    return _PACK_SHARD((src, origin, shard.sizes, _chunk_table(shard)))


@torch.library.register_fake("torchtitan_ext::pack_shard")
def _(src: Tensor, src_offsets: Sequence[int], shard_sizes: Sequence[int], chunks: Sequence[int]) -> Tensor:
    return src.new_empty(shard_sizes)


def _setup_pack_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    src, ctx.src_offsets, _, ctx.chunks = inputs
    ctx.src_sizes = src.shape


def _backward_pack_shard(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _unpacked_into_zeros(grad, ctx.src_sizes, ctx.src_offsets, ctx.chunks), None, None, None


def _unpacked_into_zeros(grad: Tensor, sizes: Sequence[int], offsets: Sequence[int], chunks: Sequence[int]) -> Tensor:
    zeros = grad.new_zeros(sizes)
    if torch.is_grad_enabled() or is_transformed():  # create_graph: the in-place form is not differentiable
        return _UNPACK_SHARD((zeros, offsets, grad, chunks))
    kernels.unpack_shard_(zeros, offsets, grad, chunks)
    return zeros


_PACK_SHARD = DifferentiableOp("pack_shard", _backward_pack_shard, setup_context=_setup_pack_shard)


def unpack_shard_(dst: Tensor, local: Tensor, shard: ShardLike, *, dst_offsets: Sequence[int] | None = None) -> None:
    """Copies one rank's shard to its places in a larger tensor, in place.

    Args:
        dst: The global tensor, or a box of it that holds all chunks of the shard; any strides. What lies
            outside the chunks is unchanged.
        local: The shard, of shape ``shard.sizes``; same dtype and device as ``dst``, any strides.
        shard: What the rank holds.
        dst_offsets: Where ``dst`` begins in the global tensor, in elements; zeros if left out.

    Raises:
        ValueError: A chunk reaches out of ``dst``, chunks overlap, elements of ``dst`` share memory with each other
            or with ``local``, or dtype, device or shape do not agree. ``dst`` is unchanged then.
    """
    _check_shape("unpack_shard_", local, shard)
    origin = [0] * len(shard.sizes) if dst_offsets is None else dst_offsets
    call("unpack_shard_", (dst, origin, local, _chunk_table(shard)))


@torch.library.register_fake("torchtitan_ext::unpack_shard_")
def _(dst: Tensor, dst_offsets: Sequence[int], shard: Tensor, chunks: Sequence[int]) -> None:
    return None


bump_version_of("unpack_shard_", 0)


def unpack_shard(dst: Tensor, local: Tensor, shard: ShardLike, *, dst_offsets: Sequence[int] | None = None) -> Tensor:
    """As ``unpack_shard_``, into a contiguous copy of ``dst``. Differentiable in both tensors."""
    _check_shape("unpack_shard", local, shard)
    origin = [0] * len(shard.sizes) if dst_offsets is None else dst_offsets
    return _UNPACK_SHARD((dst, origin, local, _chunk_table(shard)))


@torch.library.register_fake("torchtitan_ext::unpack_shard")
def _(dst: Tensor, dst_offsets: Sequence[int], shard: Tensor, chunks: Sequence[int]) -> Tensor:
    return torch.empty_like(dst, memory_format=torch.contiguous_format)


def _setup_unpack_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dst_offsets, shard, ctx.chunks = inputs
    ctx.shard_sizes = shard.shape


def _backward_unpack_shard(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_shard = _PACK_SHARD((grad, ctx.dst_offsets, ctx.shard_sizes, ctx.chunks))
    grad_dst = _UNPACK_SHARD((grad, ctx.dst_offsets, torch.zeros_like(grad_shard), ctx.chunks))
    return grad_dst, None, grad_shard, None


_UNPACK_SHARD = DifferentiableOp("unpack_shard", _backward_unpack_shard, setup_context=_setup_unpack_shard)


def pack_shards(
    src: Sequence[Tensor], shards: Sequence[ShardLike], *, src_offsets: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """``pack_shard`` of many tensors, of any dtypes on one device, in one call. Differentiable."""
    return _PACK_SHARDS((list(src), _tables("pack_shards", src, shards, src_offsets))) if src else []


def _entries(src: Sequence[Tensor], tables: Sequence[int]) -> list[tuple[list[int], list[int], list[int]]]:
    """(offsets of the box, shard sizes, chunks) of each tensor of ``tables``; ``ops.h`` has the format."""
    entries, rest = [], list(tables)
    for tensor in src:
        num_dims = tensor.dim()
        ends = [1 + num_dims, 1 + 2 * num_dims, 1 + 2 * num_dims + (3 * num_dims * rest[0] if rest else 0)]
        if not rest or rest[0] < 0 or len(rest) < ends[-1]:
            raise ValueError("pack_shards: the table ends too early")
        entries.append((rest[1 : ends[0]], rest[ends[0] : ends[1]], rest[ends[1] : ends[2]]))
        rest = rest[ends[2] :]
    return entries


@torch.library.register_fake("torchtitan_ext::pack_shards")
def _(src: Sequence[Tensor], tables: Sequence[int]) -> list[Tensor]:
    return [tensor.new_empty(sizes) for tensor, (_, sizes, _) in zip(src, _entries(src, tables), strict=True)]


def _setup_pack_shards(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    src, tables = inputs
    ctx.src_sizes = [tensor.shape for tensor in src]
    ctx.entries = _entries(src, tables)


def _backward_pack_shards(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None]:
    result: list[Tensor | None] = []
    for grad, sizes, (offsets, _, chunks) in zip(grads, ctx.src_sizes, ctx.entries, strict=True):
        result.append(None if grad is None else _unpacked_into_zeros(grad, sizes, offsets, chunks))
    return result, None


_PACK_SHARDS = DifferentiableOp("pack_shards", _backward_pack_shards, setup_context=_setup_pack_shards)


def unpack_shards_(
    dst: Sequence[Tensor],
    locals: Sequence[Tensor],
    shards: Sequence[ShardLike],
    *,
    dst_offsets: Sequence[Sequence[int]] | None = None,
) -> None:
    """``unpack_shard_`` of many tensors in one call. No two of ``dst`` may share memory."""
    tables = _tables("unpack_shards_", dst, shards, dst_offsets)
    if len(dst) != len(locals):
        raise ValueError(f"unpack_shards_: got {len(dst)} tensors and {len(locals)} local tensors")
    for local, shard in zip(locals, shards, strict=True):
        _check_shape("unpack_shards_", local, shard)
    if dst:
        call("unpack_shards_", (list(dst), list(locals), tables))


@torch.library.register_fake("torchtitan_ext::unpack_shards_")
def _(dst: Sequence[Tensor], shards: Sequence[Tensor], tables: Sequence[int]) -> None:
    return None


bump_version_of("unpack_shards_", 0)


def _chunk_table(shard: ShardLike) -> list[int]:
    table: list[int] = []
    for chunk in shard.chunks:
        table += chunk.offsets
        table += chunk.sizes
        table += chunk.local_offsets
    return table


def _tables(
    name: str, tensors: Sequence[Tensor], shards: Sequence[ShardLike], offsets: Sequence[Sequence[int]] | None
) -> list[int]:
    if len(tensors) != len(shards) or (offsets is not None and len(offsets) != len(shards)):
        raise ValueError(f"{name}: got {len(tensors)} tensors and {len(shards)} shards, expected one of each for each")
    table: list[int] = []
    for position, shard in enumerate(shards):
        table.append(len(shard.chunks))
        table += [0] * len(shard.sizes) if offsets is None else offsets[position]
        table += shard.sizes
        table += _chunk_table(shard)
    return table


def _check_shape(name: str, local: Tensor, shard: ShardLike) -> None:
    if isinstance(local, Tensor) and local.is_nested:
        raise ValueError(f"{name}: got a nested tensor as the local tensor; pass the tensor of its values")
    if isinstance(local, Tensor) and tuple(local.shape) != tuple(shard.sizes):
        raise ValueError(
            f"{name}: got a local tensor of shape {tuple(local.shape)}, expected the shard's {tuple(shard.sizes)}"
        )


# ---- flat buffers ----


def flat_offsets(tensors: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT) -> list[int]:
    """Where each tensor begins in their flat buffer, in bytes, and behind the last one the size of the buffer."""
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"flat buffer: alignment is {alignment}, expected a power of two of at most {2**20} bytes")
    offsets, end = [], 0
    for tensor in tensors:
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
    if not tensors:
        return torch.empty(0, dtype=dtype)
    return _FLATTEN_TENSORS((list(tensors), alignment, dtype))


@torch.library.register_fake("torchtitan_ext::flatten_tensors")
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
    if tensors:
        call("flatten_into_", (list(tensors), alignment, out))


@torch.library.register_fake("torchtitan_ext::flatten_into_")
def _(tensors: Sequence[Tensor], alignment: int, out: Tensor) -> None:
    return None


bump_version_of("flatten_into_", 2)


def unflatten_tensors_(tensors: Sequence[Tensor], flat: Tensor, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
    """Fills tensors, in place, from the beginning of a buffer that ``flatten_tensors`` made of tensors like them.

    Args:
        tensors: The destinations, of any strides. No two of them may share memory.
        flat: 1-d, contiguous, uint8 or the dtype of all tensors.
        alignment: That of the buffer, in bytes.
    """
    if tensors:
        call("unflatten_tensors_", (list(tensors), flat, alignment))


@torch.library.register_fake("torchtitan_ext::unflatten_tensors_")
def _(tensors: Sequence[Tensor], flat: Tensor, alignment: int) -> None:
    return None


bump_version_of("unflatten_tensors_", 0)


def flat_views(flat: Tensor, like: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT) -> list[Tensor]:
    """The tensors of a flat buffer as contiguous views into it, with the shapes and dtypes of ``like``."""
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


# ---- broadcast ----

DEFAULT_BUCKET_BYTES = 32 << 20
"""Fewer messages, each long enough for its copies to hide: 341 MB in 300 tensors take 2.1, 1.3, 1.2 and 1.1 times the
limit with 1, 8, 16 and 32 MiB on 4 gloo processes, five dtypes 2.3, 1.4, 1.3 and 1.2 (benchmarks/bench_sync.py). Three
are the extra memory, or three times the largest message where that is less."""


def broadcast_coalesced_(
    tensors: Sequence[Tensor], group_name: str, *, src: int = 0, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Fills tensors on every rank of a process group with the bits that one rank has, in place. Collective.

    Large tensors travel from memory to memory; small ones, of whatever dtype, and those that are not contiguous share
    kept buckets, of which at most three are in use. Only local checks are made: ranks that pass other sizes, another
    order, source or bucket size hang or mix up values. ``torchtitan_ext.broadcast_tensors`` has ranks agree first.

    Args:
        tensors: On one device, of any shapes and strides, in the same order on every rank; those without elements
            count for nothing. No two of them may share memory.
        group_name: ``ProcessGroup.group_name``.
        src: Rank of the source, counted in the group.
        bucket_bytes: Largest message, and size of a bucket.

    Raises:
        ValueError: A tensor cannot be received into (sparse, expanded, meta, overlapping), or ``src`` is out of range.
        RuntimeError: The transfer failed; tensors may be part-written.
    """
    if not tensors:
        return
    args = (list(tensors), group_name, src, bucket_bytes)
    _call_collective("broadcast_coalesced_", args)


@dataclass(frozen=True)
class BroadcastCheck:
    """Whether this rank could take part in a broadcast of some tensors.

    Attributes:
        digest: Of what ranks must agree on, dtypes and shapes; empty where a tensor is refused.
        positions: In the list, of the one tensor that is refused or of the two that share memory; else empty.
        reason: What is wrong with them, in words that follow their names; else empty.
    """

    digest: tuple[int, ...]
    positions: tuple[int, ...]
    reason: str


def check_broadcast(tensors: Sequence[Tensor]) -> BroadcastCheck:
    """Makes the local checks of ``broadcast_coalesced_``. It stops at the first tensor that it refuses."""
    if not tensors:
        return BroadcastCheck((), (), "")
    digest, positions, reason = _call_collective("check_broadcast", (list(tensors),))
    return BroadcastCheck(tuple(digest), tuple(positions), reason)


@torch.library.register_fake("torchtitan_ext::broadcast_coalesced_")
def _(tensors: Sequence[Tensor], group_name: str, src: int, bucket_bytes: int) -> None:
    _refuse_meta("broadcast_coalesced_", tensors)


@torch.library.register_fake("torchtitan_ext::check_broadcast")
def _(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], str]:
    _refuse_meta("check_broadcast", tensors)
    return [0, 0], [], ""


def _refuse_meta(name: str, tensors: Sequence[Tensor]) -> None:
    """Under tracing tensors are fake ones; a real meta tensor would be skipped without a word."""
    for index, tensor in enumerate(tensors):
        if type(tensor) is Tensor and tensor.is_meta:
            raise ValueError(f"{name}: tensors[{index}] is on the meta device; give it memory with to_empty() first")


bump_version_of("broadcast_coalesced_", 0)


def _call_collective(name: str, args: tuple[Any, ...]) -> Any:
    if full_abi_is_missing:
        raise ImportError(
            f"torchtitan_ext: no broadcasts: {full_abi_is_missing}; this is torch {torch.__version__}: install the "
            "package again beside it"
        )
    return call(name, args)


# ---- fingerprints ----


def fingerprint_shard(local: Tensor, shard: ShardLike, global_sizes: Sequence[int]) -> Tensor:
    """Sums the hashes of a shard's elements, each keyed by its position in the global tensor.

    The sums of disjoint shards add up, modulo 2^64, to that of the whole tensor, however it is cut; dtype and shape are
    not in it. It finds accidents, not adversaries. ``fingerprint.fingerprint`` does this for a state dict over ranks.

    Args:
        local: The shard, of shape ``shard.sizes``, any dtype and strides.
        shard: What the rank holds.
        global_sizes: Shape of the global tensor.

    Returns:
        A 0-d int64 tensor on the device of ``local``; the device is not waited for.
    """
    _check_shape("fingerprint_shard", local, shard)
    return call("fingerprint_shard", (local, global_sizes, _chunk_table(shard)))


@torch.library.register_fake("torchtitan_ext::fingerprint_shard")
def _(shard: Tensor, global_sizes: Sequence[int], chunks: Sequence[int]) -> Tensor:
    return shard.new_empty((), dtype=torch.int64)
