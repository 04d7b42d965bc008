"""The operators of the package, typed: shards and lists of tensors, to and from contiguous buffers, and their hashes.

The kernels are ``torch.ops.torchtitan_ext.*`` (schemas: ``csrc/ops/library.cpp``). The modules have the
wrappers, and beside each the fake kernel and the autograd formula, which LibTorch's stable ABI cannot express.

Every op works on CPU and CUDA tensors of any dtype (bytes are moved, never values) and under ``torch.compile``. Bad
arguments raise ValueError, a tensor in place of a list TypeError, sizes beyond int64 OverflowError, always before the
first byte moves. An op whose name ends in ``_`` changes its argument in place, bumps its version counter and is not
differentiable; where its arguments require grad, call it under ``torch.no_grad()`` or use the form without ``_``.
"""

from torchtitan_ext.ops.broadcast import DEFAULT_BUCKET_BYTES, BroadcastCheck, broadcast_coalesced_, check_broadcast
from torchtitan_ext.ops.exchange import PlannedExchange, dtype_number, exchange_runs_, numbered_dtype
from torchtitan_ext.ops.flat import (
    DEFAULT_ALIGNMENT,
    flat_offsets,
    flat_views,
    flatten_into_,
    flatten_tensors,
    unflatten_tensors_,
)
from torchtitan_ext.ops.shards import (
    ChunkLike,
    ShardLike,
    fingerprint_shard,
    fingerprint_shards,
    pack_shard,
    pack_shards,
    unpack_shard,
    unpack_shard_,
    unpack_shards_,
)

__all__ = [
    "BroadcastCheck",
    "ChunkLike",
    "DEFAULT_ALIGNMENT",
    "DEFAULT_BUCKET_BYTES",
    "PlannedExchange",
    "ShardLike",
    "broadcast_coalesced_",
    "check_broadcast",
    "dtype_number",
    "exchange_runs_",
    "fingerprint_shard",
    "fingerprint_shards",
    "flat_offsets",
    "flat_views",
    "flatten_into_",
    "flatten_tensors",
    "numbered_dtype",
    "pack_shard",
    "pack_shards",
    "unflatten_tensors_",
    "unpack_shard",
    "unpack_shard_",
    "unpack_shards_",
]
