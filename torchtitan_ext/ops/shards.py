"""Strided shards packed into contiguous tensors and back, and their fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_ext.op_library import (
    DifferentiableOp,
    call,
    is_transformed,
    kernels,
    listed,
    register_fake,
    register_in_place,
)


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


@register_fake("pack_shard")
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


register_in_place("unpack_shard_", 0)


def unpack_shard(dst: Tensor, local: Tensor, shard: ShardLike, *, dst_offsets: Sequence[int] | None = None) -> Tensor:
    """As ``unpack_shard_``, into a contiguous copy of ``dst``. Differentiable in both tensors."""
    _check_shape("unpack_shard", local, shard)
    origin = [0] * len(shard.sizes) if dst_offsets is None else dst_offsets
    return _UNPACK_SHARD((dst, origin, local, _chunk_table(shard)))


@register_fake("unpack_shard")
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
    given = listed("pack_shards", "src", src)
    tables = _shard_tables("pack_shards", given, shards, src_offsets)
    return _PACK_SHARDS((given, tables)) if given else []


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


@register_fake("pack_shards")
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
    given, given_locals = listed("unpack_shards_", "dst", dst), listed("unpack_shards_", "locals", locals)
    tables = _shard_tables("unpack_shards_", given, shards, dst_offsets)
    if len(given) != len(given_locals):
        raise ValueError(f"unpack_shards_: got {len(given)} tensors and {len(given_locals)} local tensors")
    _check_shapes("unpack_shards_", given_locals, shards)
    if given:
        call("unpack_shards_", (given, given_locals, tables))


register_in_place("unpack_shards_", 0)


def _chunk_table(shard: ShardLike) -> list[int]:
    table: list[int] = []
    for chunk in shard.chunks:
        table += chunk.offsets
        table += chunk.sizes
        table += chunk.local_offsets
    return table


def _shard_tables(
    name: str, tensors: Sequence[Tensor], shards: Sequence[ShardLike], offsets: Sequence[Sequence[int]] | None
) -> list[int]:
    """The tables of a list; ``ops.h`` has the formats. In place of offsets stand global sizes in some of them."""
    if len(tensors) != len(shards) or (offsets is not None and len(offsets) != len(shards)):
        raise ValueError(f"{name}: got {len(tensors)} tensors and {len(shards)} shards, expected one of each for each")
    table: list[int] = []
    for position, shard in enumerate(shards):
        table.append(len(shard.chunks))
        table += [0] * len(shard.sizes) if offsets is None else offsets[position]
        table += shard.sizes
        table += _chunk_table(shard)
    return table


def _check_shapes(name: str, locals: Sequence[Tensor], shards: Sequence[ShardLike]) -> None:
    for local, shard in zip(locals, shards, strict=True):
        _check_shape(name, local, shard)


def _check_shape(name: str, local: Tensor, shard: ShardLike) -> None:
    if isinstance(local, Tensor) and local.is_nested:
        raise ValueError(f"{name}: got a nested tensor as the local tensor; pass the tensor of its values")
    if isinstance(local, Tensor) and tuple(local.shape) != tuple(shard.sizes):
        raise ValueError(
            f"{name}: got a local tensor of shape {tuple(local.shape)}, expected the shard's {tuple(shard.sizes)}"
        )


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


@register_fake("fingerprint_shard")
def _(shard: Tensor, global_sizes: Sequence[int], chunks: Sequence[int]) -> Tensor:
    return shard.new_empty((), dtype=torch.int64)


def fingerprint_shards(
    locals: Sequence[Tensor], shards: Sequence[ShardLike], global_sizes: Sequence[Sequence[int]]
) -> Tensor:
    """``fingerprint_shard`` of many shards in one call.

    Args:
        locals: At least one, all on one device.
        shards: What part of its global tensor each of them is.
        global_sizes: Shapes of the global tensors.

    Returns:
        The sums, int64 of shape ``(len(locals),)`` on the device of the shards, which is not waited for.
    """
    name = "fingerprint_shards"
    given = listed(name, "locals", locals)
    if not given:
        raise ValueError(f"{name}: got no tensors, expected at least one")
    tables = _shard_tables(name, given, shards, global_sizes)
    _check_shapes(name, given, shards)
    return call(name, (given, tables))


@register_fake("fingerprint_shards")
def _(shards: Sequence[Tensor], tables: Sequence[int]) -> Tensor:
    return shards[0].new_empty((len(shards),), dtype=torch.int64)
