"""Gives replicas the bits of one source, in place: lists of tensors, modules and state dicts.

Every function is collective. Ranks first agree on what they sync; where they cannot, all raise the same
``SyncMismatchError`` before any data moves. The walk of a call:

    calls -> tensors -> batches (a list), replicas (a module, with slices) -> same_call -> _send | check
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext import ops
from torchtitan_ext.errors import SyncMismatchError, check_argument, refusal
from torchtitan_ext.metrics import log_metrics, timed
from torchtitan_ext.ranks.exchange import check_usable, device_of, has_backend, scope_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks
from torchtitan_ext.sync.batches import Batch, ListBatch, ReplicaBatches, collect_list
from torchtitan_ext.sync.calls import BroadcastCall, Buffers, Call, SyncCall, outside_graphs
from torchtitan_ext.sync.check import compare_replicas
from torchtitan_ext.sync.replicas import collect_replicas
from torchtitan_ext.sync.same_call import confirm_same_call
from torchtitan_ext.sync.slices import agree_on_presumed, slice_digests
from torchtitan_ext.sync.tensors import ModuleOrState

logger = logging.getLogger(__name__)


@outside_graphs
def broadcast_tensors(
    tensors: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    src: int = 0,
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> None:
    """Fills tensors on every rank of a group with the bits of the source, in place. Collective over the group.

    Args:
        tensors: Plain tensors of any dtypes, devices, shapes and strides, in the same order on every rank. They are
            written under ``no_grad``; their version counters are bumped. Equal views of one memory (tied weights) are
            sent once, and must be tied on every rank.
        group: The group of the ranks; by default the default group.
        src: The source's rank in the group.
        bucket_bytes: See ``ops.broadcast_coalesced_``.
        check: Whether ranks first agree on these arguments, in one small exchange. Without it, ranks that disagree hang
            or mix up values.

    Raises:
        SyncMismatchError: Ranks disagree, or a tensor cannot be received into. Nothing was changed.
        WrongArgumentError: On some rank ``tensors`` is no list. A ``TypeError``; nothing was changed.
        LostRankError: A rank is gone, or does not take part. Names the phase and the ranks that do not answer.
    """
    if not dist.is_initialized():
        raise ValueError("broadcast_tensors: there is no process group; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"broadcast_tensors: rank {dist.get_rank()} is not in the group; call it on its ranks only")
    check_usable("broadcast_tensors", group)
    call = BroadcastCall("broadcast_tensors", group, src, bucket_bytes)
    found = collect_list(tensors, group, src)
    found.problems += call.problems()
    seconds: dict[str, float] = {}
    if check:
        with timed(seconds, "agree"), _agreeing(call):
            confirm_same_call(call, found)
    elif found.problems:
        raise refusal("broadcast_tensors", found.problems)
    _send(call, found, seconds)
    _log(call, found, seconds)


@outside_graphs
def sync_module_states(
    module: ModuleOrState,
    mesh: DeviceMesh | None = None,
    *,
    src: int = 0,
    params: bool = True,
    buffers: Buffers = "all",
    ignore: Collection[str] = (),
    verify: bool = False,
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
) -> None:
    """Gives every replica of a module's parameters and buffers the bits of the source, in place.

    A DTensor is broadcast along the mesh axes on which it is replicated, and along no other; a plain buffer over the
    whole mesh. A plain *parameter* is synced only where an explicit ``mesh`` says that it is a replica, and otherwise
    refused by name. If a DTensor lies on each of several slices of an explicit ``mesh`` (a norm that a TP plan leaves
    out; experts, unless ignored), it is also broadcast along the axes that its own mesh lacks; without ``mesh`` it is
    not. Call it after ``to_empty`` and ``init_weights``, after a load, or when a replica joins.

    Collective over ``mesh``; without one over the default process group, where every rank passes the tensors that it
    holds (its pipeline parts). FSDP2 modules stay resharded.

    Args:
        module: A module, a list of pipeline parts, or a nested state dict. Wrapped by torch.compile, activation
            checkpointing or DDP alike; parameters may be frozen, offloaded to the CPU, tied, or fp8 wrappers.
        mesh: Where plain tensors, and DTensors on slices of it, are replicated. It must hold the mesh of every DTensor.
        src: Coordinate of the source on every axis that replicates.
        params: Whether parameters are synced.
        buffers: Which buffers are synced.
        ignore: Canonical names or globs of tensors that do not take part.
        verify: Whether to prove afterwards, by ``check_replicas``, that all replicas are equal.
        bucket_bytes: See ``ops.broadcast_coalesced_``.

    Raises:
        SyncMismatchError: The same on every rank: ranks disagree or a tensor cannot be synced, nothing was changed; or
            ``verify`` found replicas that differ.
        WrongArgumentError: On some rank ``module`` has another type. A ``TypeError``; nothing was changed.
        LostRankError: As ``broadcast_tensors``.
    """
    selection: dict[str, Any] = {"params": params, "buffers": buffers, "ignore": ignore}
    _sync(module, SyncCall("sync_module_states", mesh, src, bucket_bytes, **selection, verify=verify))


@outside_graphs
def sync_state_dict(
    state_dict: Mapping[str, Any],
    mesh: DeviceMesh | None = None,
    *,
    src: int = 0,
    ignore: Collection[str] = (),
    verify: bool = False,
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
) -> None:
    """``sync_module_states`` of the tensors of a nested state dict, for example ``optimizer.state_dict()``.

    Plain tensors (an optimizer's ``step``) need an explicit ``mesh``. Values that are no tensors are left alone.
    """
    _sync(state_dict, SyncCall("sync_state_dict", mesh, src, bucket_bytes, ignore=ignore, verify=verify))


def _sync(source: ModuleOrState, call: SyncCall) -> None:
    mesh = call.scope
    check_argument(call.operation, "mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh")
    if mesh is not None and mesh.get_coordinate() is None:
        return
    check_usable(call.operation, mesh)
    found = collect_replicas(source, call, src=call.src)
    seconds: dict[str, float] = {}
    with timed(seconds, "agree"), _agreeing(call):
        slices = () if mesh is None else slice_digests(found, {})
        digests = confirm_same_call(call, found, slices=slices)
        if mesh is not None and any(digest.slices for digest in digests):
            found = collect_replicas(source, call, src=call.src, joined=agree_on_presumed(found, call))
            confirm_same_call(call, found)
    _send(call, found, seconds)
    if call.verify:
        with timed(seconds, "verify"):
            differences = compare_replicas(call, found)
        if differences:
            raise SyncMismatchError(call.operation, tuple(entry.problem() for entry in differences))
    _log(call, found, seconds)


def _agreeing(call: Call) -> AbstractContextManager[None]:
    return naming_lost_ranks(call.operation, "ranks agreed on what to sync; nothing was changed", call.scope)


def _send(call: BroadcastCall, found: ReplicaBatches, seconds: dict[str, float]) -> None:
    """Fills all tensors of all batches from their sources, in place. Collective over the groups of the batches."""
    lost = naming_lost_ranks(call.operation, "tensors were sent; some may be part-written", call.scope)
    with timed(seconds, "send"), lost, torch.no_grad():
        for key, batch in sorted(found.batches.items()):
            if has_backend(batch.group, key[2]):
                group = batch.group.group_name
                ops.broadcast_coalesced_(batch.locals, group, src=batch.src, bucket_bytes=call.bucket_bytes)
            else:
                _send_staged(batch, call.bucket_bytes, device_of(batch.group))
        # A DTensor or wrapper has a version counter besides those of the tensors in it.
        # Compare types: every parameter, a DTensor too, is an instance of nn.Parameter.
        outer = [owner for owner in found.owners if type(owner) not in (Tensor, nn.Parameter)]
        torch.autograd.graph.increment_version(outer)


def _send_staged(batch: Batch | ListBatch, bucket_bytes: int, device: torch.device) -> None:
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


def _log(call: Call, found: ReplicaBatches, seconds: Mapping[str, float]) -> None:
    """Logs a sync on the first of its ranks. Counts the bytes of thousands of tensors only where somebody listens."""
    if not logger.isEnabledFor(logging.INFO):
        return
    ranks = scope_ranks(call.scope)
    if not dist.is_initialized() or dist.get_rank() == ranks[0]:
        num_bytes = sum(local.nbytes for batch in found.batches.values() for local in batch.locals)
        log_metrics(logger, call.operation, ranks=len(ranks), num_bytes=num_bytes, phase_seconds=seconds)
