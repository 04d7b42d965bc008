"""Brings replicas to the bits of one source: lists of tensors, modules and state dicts, in place.

Every function is collective, first has all ranks agree on what is synced, and raises the same ``SyncMismatchError`` on
all of them before any data moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext import ops
from torchtitan_ext.errors import Problem, SyncMismatchError
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.ranks.exchange import device_of, has_backend
from torchtitan_ext.ranks.lost_ranks import Scope, naming_lost_ranks
from torchtitan_ext.sync.check import compare_replicas
from torchtitan_ext.sync.find import (
    Batch,
    Buffers,
    ListBatch,
    Replicas,
    ReplicaTensor,
    Source,
    collect_replicas,
    inner_tensors,
    is_plain_list,
    listed_fqn,
    refusal_in_list,
)
from torchtitan_ext.sync.same_call import Options, agree


@torch.compiler.disable
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
            written under ``no_grad``; their version counters are bumped.
        group: The ranks; the default group if left out.
        src: Rank of the source, counted in the group.
        bucket_bytes: See ``ops.broadcast_coalesced_``.
        check: Whether ranks first agree on all of this, in one small exchange. Without it ranks that disagree hang or
            mix up values.

    Raises:
        SyncMismatchError: Ranks disagree, or a tensor cannot be received into. Nothing was changed.
        LostRankError: A rank is gone, or does not take part. Says in which phase, and which ranks do not answer.
    """
    if not dist.is_initialized():
        raise ValueError("broadcast_tensors: there is no process group; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"broadcast_tensors: rank {dist.get_rank()} is not in the group; call it on its ranks only")
    ranks = tuple(dist.get_process_group_ranks(group))
    found = _listed(tensors, group, ranks, src)
    found.problems += _bucket_problems(bucket_bytes)
    if check:
        _agree("broadcast_tensors", group, {"src": src, "bucket_bytes": bucket_bytes}, found)
    elif found.problems:
        raise SyncMismatchError("broadcast_tensors", tuple(found.problems))
    _broadcast("broadcast_tensors", group, found, bucket_bytes)


@torch.compiler.disable
def sync_module_states(
    module: Source,
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
    refused by name. Call it after ``to_empty`` and ``init_weights``, after a load, or when a replica joins.

    Collective over ``mesh``; without one over the default process group, where every rank passes what it holds (its
    pipeline parts). FSDP2 modules are left resharded.

    Args:
        module: A module, a list of pipeline parts, or a nested state dict. Wrapped by torch.compile, activation
            checkpointing or DDP alike; parameters may be frozen, offloaded to the CPU, tied, or fp8 wrappers.
        mesh: Where plain tensors are replicated. It must hold the mesh of every DTensor.
        src: Coordinate of the source on every axis that replicates.
        params: Whether parameters are synced.
        buffers: Which buffers are.
        ignore: Canonical names or globs that are left alone.
        verify: Whether to prove afterwards, by ``check_replicas``, that all replicas are equal.
        bucket_bytes: See ``ops.broadcast_coalesced_``.

    Raises:
        SyncMismatchError: The same on every rank: ranks disagree or a tensor cannot be synced, nothing was changed; or
            ``verify`` found replicas that differ.
        LostRankError: As ``broadcast_tensors``.
    """
    options = {"src": src, "params": params, "buffers": buffers, "ignore": ignore, "verify": verify}
    _sync("sync_module_states", module, mesh, src, {**options, "bucket_bytes": bucket_bytes})


@torch.compiler.disable
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
    options = {"src": src, "ignore": ignore, "verify": verify, "bucket_bytes": bucket_bytes}
    _sync("sync_state_dict", state_dict, mesh, src, options)


def _sync(operation: str, source: Source, mesh: DeviceMesh | None, src: int, options: Options) -> None:
    if mesh is not None and mesh.get_coordinate() is None:
        return
    found = collect_replicas(
        source,
        mesh,
        src,
        params=options.get("params", True),
        buffers=options.get("buffers", "all"),
        ignore=options["ignore"],
    )
    found.problems += _bucket_problems(options["bucket_bytes"])
    _agree(operation, mesh, options, found)
    _broadcast(operation, mesh, found, options["bucket_bytes"])
    if options["verify"]:
        differences = compare_replicas(operation, mesh, options, found)
        if differences:
            raise SyncMismatchError(operation, tuple(entry.problem() for entry in differences))


def _listed(tensors: Sequence[Tensor], group: dist.ProcessGroup, ranks: tuple[int, ...], src: int) -> Replicas:
    """The tensors of a list as replicas along one group, named by their position."""
    found = Replicas()
    if not isinstance(src, int) or not 0 <= src < len(ranks):
        found.problems.append(
            Problem("cannot_sync", "src", f"got {src!r}, expected a rank of the group, 0 to {len(ranks) - 1}")
        )
        return found
    if not isinstance(tensors, Sequence):
        what = f"is a {type(tensors).__name__}, expected a list of tensors"
        found.problems.append(Problem("cannot_sync", "tensors", what))
        return found
    if not tensors:
        return found
    if is_plain_list(tensors):
        found.batches[0, ranks, tensors[0].device.type] = ListBatch(group, src, list(tensors))
        return found
    fqns = []
    for index, tensor in enumerate(tensors):
        name = listed_fqn(index)
        problem = refusal_in_list(name, tensor)
        if problem is not None:
            found.problems.append(problem)
            continue
        found.owners.append(tensor)
        for fqn, local in inner_tensors(name, local_tensor(tensor)):
            batch = found.batches.setdefault((0, ranks, local.device.type), Batch(group, src))
            batch.tensors.append(ReplicaTensor(fqn, local, "", ranks, ()))
            fqns.append(fqn)
    if len(found.batches) == 1 and fqns == [listed_fqn(index) for index in range(len(tensors))]:
        # Plain on another rank perhaps, and alike.
        found.batches = {key: ListBatch(group, src, batch.locals) for key, batch in found.batches.items()}
    return found


def _bucket_problems(bucket_bytes: int) -> list[Problem]:
    if isinstance(bucket_bytes, int) and 0 < bucket_bytes < 2**63:
        return []
    return [Problem("cannot_sync", "bucket_bytes", f"got {bucket_bytes!r}, expected a positive int64")]


def _agree(operation: str, scope: Scope, options: Options, found: Replicas) -> None:
    with naming_lost_ranks(operation, "ranks agreed on what to sync; nothing was changed", scope):
        agree(operation, scope, options, found)


def _broadcast(operation: str, scope: Scope, found: Replicas, bucket_bytes: int) -> None:
    lost = naming_lost_ranks(operation, "tensors were sent; some may be part-written", scope)
    with lost, torch.no_grad():
        for key, batch in sorted(found.batches.items()):
            tensors = batch.locals
            if has_backend(batch.group, key[2]):
                ops.broadcast_coalesced_(tensors, batch.group.group_name, src=batch.src, bucket_bytes=bucket_bytes)
            else:
                _broadcast_staged(tensors, batch, bucket_bytes, device_of(batch.group))
        # A DTensor, and a wrapper, counts versions apart from the tensors in it.
        # By type: any tensor of a parameter, DTensors too, is an instance of nn.Parameter.
        outer = [owner for owner in found.owners if type(owner) not in (Tensor, nn.Parameter)]
        torch.autograd.graph.increment_version(outer)


def _broadcast_staged(
    tensors: Sequence[Tensor], batch: Batch | ListBatch, bucket_bytes: int, device: torch.device
) -> None:
    """By way of buckets on ``device``: CPU tensors (FSDP2's offload) in a group of accelerators, or the reverse.

    Tensors larger than a bucket go in slices of their bytes.
    """
    for chunk in _chunks(tensors, bucket_bytes):
        flat = ops.flatten_tensors(chunk)
        for part in flat.split(bucket_bytes):
            bucket = part.to(device)
            ops.broadcast_coalesced_([bucket], batch.group.group_name, src=batch.src, bucket_bytes=bucket_bytes)
            part.copy_(bucket)
        ops.unflatten_tensors_(chunk, flat)


def _chunks(tensors: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of tensors whose flat buffer has at most so many bytes, or of one tensor that has more."""
    pending = [tensor for tensor in tensors if tensor.numel() > 0]
    while pending:
        count = max(1, sum(end <= num_bytes for end in ops.flat_offsets(pending)[1:]))
        yield pending[:count]
        pending = pending[count:]
