"""The operators of the package, typed: strided shards to and from contiguous buffers.

The kernels are ``torch.ops.torchtitan_ext.*`` (schemas: ``csrc/ops/library.cpp``); this is the only module that names
them. Here stand the wrappers, and beside each the fake kernel and the autograd formula, which LibTorch's stable ABI
cannot express.

Every op works on CPU and CUDA tensors of any dtype (bytes are moved, never values) and under ``torch.compile``. Bad
arguments raise ValueError, sizes beyond int64 OverflowError, always before the first byte moves. An op whose name ends
in ``_`` changes its argument in place, bumps its version counter and is not differentiable; where its arguments
require grad, call it under ``torch.no_grad()`` or use the form without ``_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core


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
    _check_plain("pack_shard", src)
    return _ops.pack_shard(src, _origin(src, src_offsets), shard.sizes, _chunk_table(shard))


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
    _check_plain("unpack_shard_", dst, local)
    _check_sizes("unpack_shard_", local, shard)
    _ops.unpack_shard_(dst, _origin(dst, dst_offsets), local, _chunk_table(shard))


def unpack_shard(dst: Tensor, local: Tensor, shard: ShardLike, *, dst_offsets: Sequence[int] | None = None) -> Tensor:
    """As ``unpack_shard_``, into a contiguous copy of ``dst``. Differentiable in both tensors."""
    _check_plain("unpack_shard", dst, local)
    _check_sizes("unpack_shard", local, shard)
    return _ops.unpack_shard(dst, _origin(dst, dst_offsets), local, _chunk_table(shard))


def _origin(tensor: Tensor, offsets: Sequence[int] | None) -> Sequence[int]:
    return (0,) * tensor.dim() if offsets is None else offsets


def _chunk_table(shard: ShardLike) -> list[int]:
    table: list[int] = []
    for chunk in shard.chunks:
        table += chunk.offsets
        table += chunk.sizes
        table += chunk.local_offsets
    return table


def _check_plain(where: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where}: got a {type(tensor).__name__}, expected a tensor")
        if isinstance(tensor, DTensor):
            raise ValueError(f"{where}: got a DTensor, expected a rank's own tensor; pass its .to_local()")


def _check_sizes(where: str, local: Tensor, shard: ShardLike) -> None:
    if tuple(local.shape) != tuple(shard.sizes):
        raise ValueError(
            f"{where}: got a local tensor of shape {tuple(local.shape)}, expected the shard's {tuple(shard.sizes)}"
        )


# ---- the library, fake kernels, autograd ----


def _load_library() -> None:
    path = Path(_core.__file__).with_name("_ops.so")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"torchtitan_ext: {path} does not load beside torch {torch.__version__}. Likely causes: torch older than "
            "2.11, or the package was built on another machine or for another Python; install it again where it runs. "
            f"The loader says: {error}"
        ) from error


_load_library()
_ops = torch.ops.torchtitan_ext
_library = torch.library.Library("torchtitan_ext", "IMPL")


def _bump_version_of(name: str, argument: int) -> None:
    """Registers what makes an in-place op known to autograd: without it backward uses overwritten values in silence."""
    op = getattr(_ops, name).default

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args)):
            raise RuntimeError(
                f"{name} is not differentiable: an argument requires grad; call it under torch.no_grad(), "
                "or use the form without the final underscore"
            )
        if any(tensor.is_conj() or tensor.is_neg() for tensor in _tensors(args[argument : argument + 1])):
            raise ValueError(f"{name}: got a lazily conjugated or negated view to write into; pass the tensor it views")
        op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version(args[argument])

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    tensors = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
            tensors += arg
    return tensors


@torch.library.register_fake("torchtitan_ext::pack_shard")
def _(src: Tensor, src_offsets: Sequence[int], shard_sizes: Sequence[int], chunks: Sequence[int]) -> Tensor:
    return src.new_empty(shard_sizes)


def _setup_pack_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    src, ctx.src_offsets, _, ctx.chunks = inputs
    ctx.src_sizes = src.shape


def _backward_pack_shard(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    zeros = grad.new_zeros(ctx.src_sizes)
    if torch.is_grad_enabled():  # create_graph
        return _ops.unpack_shard(zeros, ctx.src_offsets, grad, ctx.chunks), None, None, None
    _ops.unpack_shard_(zeros, ctx.src_offsets, grad, ctx.chunks)
    return zeros, None, None, None


torch.library.register_autograd("torchtitan_ext::pack_shard", _backward_pack_shard, setup_context=_setup_pack_shard)


@torch.library.register_fake("torchtitan_ext::unpack_shard_")
def _(dst: Tensor, dst_offsets: Sequence[int], shard: Tensor, chunks: Sequence[int]) -> None:
    return None


_bump_version_of("unpack_shard_", 0)


@torch.library.register_fake("torchtitan_ext::unpack_shard")
def _(dst: Tensor, dst_offsets: Sequence[int], shard: Tensor, chunks: Sequence[int]) -> Tensor:
    return torch.empty_like(dst, memory_format=torch.contiguous_format)


def _setup_unpack_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dst_offsets, shard, ctx.chunks = inputs
    ctx.shard_sizes = shard.shape


def _backward_unpack_shard(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_shard = _ops.pack_shard(grad, ctx.dst_offsets, ctx.shard_sizes, ctx.chunks)
    grad_dst = _ops.unpack_shard(grad, ctx.dst_offsets, torch.zeros_like(grad_shard), ctx.chunks)
    return grad_dst, None, grad_shard, None


torch.library.register_autograd(
    "torchtitan_ext::unpack_shard", _backward_unpack_shard, setup_context=_setup_unpack_shard
)
