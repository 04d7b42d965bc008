"""Brings replicas to the bits of one source: lists of tensors, modules and state dicts, in place.

Every function is collective, first has all ranks agree on what is synced, and raises the same ``SyncMismatchError`` on
all of them before any data moved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext import ops
from torchtitan_ext.errors import SyncMismatchError, check_argument, refusal
from torchtitan_ext.metrics import log_metrics, timed
from torchtitan_ext.ranks.exchange import Scope, check_usable, scope_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks
from torchtitan_ext.sync.broadcast import broadcast_replicas
from torchtitan_ext.sync.check import compare_replicas
from torchtitan_ext.sync.named_tensors import ModuleOrState
from torchtitan_ext.sync.options import Buffers, Options, option_problems
from torchtitan_ext.sync.outside_graphs import outside_graphs
from torchtitan_ext.sync.presumed import agree_on_presumed, summaries
from torchtitan_ext.sync.replicas import Replicas, collect_replicas
from torchtitan_ext.sync.same_call import confirm_same_call
from torchtitan_ext.sync.tensor_list import collect_list

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
        group: The ranks; the default group if left out.
        src: Rank of the source, counted in the group.
        bucket_bytes: See ``ops.broadcast_coalesced_``.
        check: Whether ranks first agree on all of this, in one small exchange. Without it ranks that disagree hang or
            mix up values.

    Raises:
        SyncMismatchError: Ranks disagree, or a tensor cannot be received into. Nothing was changed.
        WrongArgumentError: ``tensors`` is no list, on some rank. A ``TypeError``; nothing was changed.
        LostRankError: A rank is gone, or does not take part. Says in which phase, and which ranks do not answer.
    """
    if not dist.is_initialized():
        raise ValueError("broadcast_tensors: there is no process group; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"broadcast_tensors: rank {dist.get_rank()} is not in the group; call it on its ranks only")
    check_usable("broadcast_tensors", group)
    options = Options(src=src, bucket_bytes=bucket_bytes)
    found = collect_list(tensors, group, src)
    found.problems += [problem for problem in option_problems(options) if problem.fqn == "bucket_bytes"]
    seconds: dict[str, float] = {}
    if check:
        with timed(seconds, "agree"), _agreeing("broadcast_tensors", group):
            confirm_same_call("broadcast_tensors", group, options, found)
    elif found.problems:
        raise refusal("broadcast_tensors", found.problems)
    _send("broadcast_tensors", group, options, found, seconds)
    _log("broadcast_tensors", group, found, seconds)


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
    refused by name. Likewise a DTensor on each of several slices of an explicit ``mesh`` (a norm that a TP plan leaves
    out; experts, unless ignored) is broadcast along the axes that its own mesh lacks too; without ``mesh`` it is
    left alone there. Call it after ``to_empty`` and ``init_weights``, after a load, or when a replica joins.

    Collective over ``mesh``; without one over the default process group, where every rank passes what it holds (its
    pipeline parts). FSDP2 modules are left resharded.

    Args:
        module: A module, a list of pipeline parts, or a nested state dict. Wrapped by torch.compile, activation
            checkpointing or DDP alike; parameters may be frozen, offloaded to the CPU, tied, or fp8 wrappers.
        mesh: Where plain tensors, and DTensors on slices of it, are replicated. It must hold the mesh of every DTensor.
        src: Coordinate of the source on every axis that replicates.
        params: Whether parameters are synced.
        buffers: Which buffers are.
        ignore: Canonical names or globs that are left alone.
        verify: Whether to prove afterwards, by ``check_replicas``, that all replicas are equal.
        bucket_bytes: See ``ops.broadcast_coalesced_``.

    Raises:
        SyncMismatchError: The same on every rank: ranks disagree or a tensor cannot be synced, nothing was changed; or
            ``verify`` found replicas that differ.
        WrongArgumentError: ``module`` is something else, on some rank. A ``TypeError``; nothing was changed.
        LostRankError: As ``broadcast_tensors``.
    """
    options = Options(src=src, params=params, buffers=buffers, ignore=ignore, verify=verify, bucket_bytes=bucket_bytes)
    _sync("sync_module_states", module, mesh, options)


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
    options = Options(src=src, ignore=ignore, verify=verify, bucket_bytes=bucket_bytes)
    _sync("sync_state_dict", state_dict, mesh, options)


def _sync(operation: str, source: ModuleOrState, mesh: DeviceMesh | None, options: Options) -> None:
    check_argument(operation, "mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh")
    if mesh is not None and mesh.get_coordinate() is None:
        return
    check_usable(operation, mesh)
    found = collect_replicas(source, mesh, options)
    seconds: dict[str, float] = {}
    with timed(seconds, "agree"), _agreeing(operation, mesh):
        parts = () if mesh is None else summaries(found, {})
        records = confirm_same_call(operation, mesh, options, found, parts=parts)
        if mesh is not None and any(record.parts for record in records):
            found = collect_replicas(source, mesh, options, agree_on_presumed(found, mesh))
            confirm_same_call(operation, mesh, options, found)
    _send(operation, mesh, options, found, seconds)
    if options.verify:
        with timed(seconds, "verify"):
            differences = compare_replicas(operation, mesh, options, found, across_meshes=False)
        if differences:
            raise SyncMismatchError(operation, tuple(entry.problem() for entry in differences))
    _log(operation, mesh, found, seconds)


def _agreeing(operation: str, scope: Scope) -> AbstractContextManager[None]:
    return naming_lost_ranks(operation, "ranks agreed on what to sync; nothing was changed", scope)


def _send(operation: str, scope: Scope, options: Options, found: Replicas, seconds: dict[str, float]) -> None:
    with timed(seconds, "send"), naming_lost_ranks(operation, "tensors were sent; some may be part-written", scope):
        broadcast_replicas(found, options.bucket_bytes)


def _log(operation: str, scope: Scope, found: Replicas, seconds: Mapping[str, float]) -> None:
    """Logs a sync on the first of its ranks. Thousands of tensors are counted only where somebody listens."""
    if not logger.isEnabledFor(logging.INFO):
        return
    ranks = scope_ranks(scope)
    if not dist.is_initialized() or dist.get_rank() == ranks[0]:
        num_bytes = sum(local.nbytes for batch in found.batches.values() for local in batch.locals)
        log_metrics(logger, operation, ranks=len(ranks), num_bytes=num_bytes, phase_seconds=seconds)
