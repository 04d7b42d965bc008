"""Sends batches of tensors, from memory to memory or by way of a device from which the group can send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torchtitan_ext import ops
from torchtitan_ext.ranks.exchange import device_of, has_backend
from torchtitan_ext.sync.batches import Batch, ListBatch, Replicas


def broadcast_replicas(found: Replicas, bucket_bytes: int) -> None:
    """Fills all tensors of all batches from their sources, in place. Collective over the groups of the batches."""
    with torch.no_grad():
        for key, batch in sorted(found.batches.items()):
            if has_backend(batch.group, key[2]):
                ops.broadcast_coalesced_(batch.locals, batch.group.group_name, src=batch.src, bucket_bytes=bucket_bytes)
            else:
                _broadcast_staged(batch, bucket_bytes, device_of(batch.group))
        # A DTensor or wrapper has a version counter besides those of the tensors in it.
        # Compare types: every parameter, a DTensor too, is an instance of nn.Parameter.
        outer = [owner for owner in found.owners if type(owner) not in (Tensor, nn.Parameter)]
        torch.autograd.graph.increment_version(outer)


def _broadcast_staged(batch: Batch | ListBatch, bucket_bytes: int, device: torch.device) -> None:
    """Sends by way of buckets on ``device``: CPU tensors (FSDP2's offload) in a group of accelerators, or the reverse.

    Tensors larger than a bucket go in slices of their bytes.
    """
    for chunk in _chunks(batch.locals, bucket_bytes):
        flat = ops.flatten_tensors(chunk)
        for part in flat.split(bucket_bytes):
            bucket = part.to(device)
            ops.broadcast_coalesced_([bucket], batch.group.group_name, src=batch.src, bucket_bytes=bucket_bytes)
            part.copy_(bucket)
        ops.unflatten_tensors_(chunk, flat)


def _chunks(tensors: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors whose flat buffer has at most ``num_bytes``, or one tensor that has more."""
    pending = [tensor for tensor in tensors if tensor.numel() > 0]
    while pending:
        count = max(1, sum(end <= num_bytes for end in ops.flat_offsets(pending)[1:]))
        yield pending[:count]
        pending = pending[count:]
