"""Full tensors from DTensors and back, right on every layout the planners know.

Layouts are decided as for a checkpoint: over the reports of all ranks of the mesh, in one exchange per mesh. Models
then go tensor by tensor, so a rank holds one full tensor beside its shards, unless it keeps the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.cast import CastPolicy, cast_problem
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import Describer, is_on_mesh, local_tensor
from torchtitan_ext.layout.layout import ShardReport, Steps, decide, mesh_coordinates, num_elements, shard_of
from torchtitan_ext.layout.rules import LayoutRules, ShardOrder, canonical_fqn
from torchtitan_ext.ranks.exchange import (
    all_gather_bytes,
    all_gather_values,
    as_bytes,
    broadcast_bytes,
    device_of,
    gather_values,
)

Decided = tuple[ShardReport, Steps]
"""This rank's report and the true sharding order."""


def full_tensor(dtensor: DTensor, *, layout: ShardOrder | None = None) -> torch.Tensor:
    """The global tensor, on every rank. Collective over the DTensor's mesh.

    Unlike ``DTensor.full_tensor`` it is right for uneven strided shards and for shards of several boxes, and not
    differentiable.

    Args:
        dtensor: Any layout but Partial; any dtype.
        layout: The order in which the axes were sharded, where placements cannot say it.

    Returns:
        A new contiguous tensor of the global shape on the local tensor's device.

    Raises:
        LayoutError: The layout is in doubt, or the local tensors do not fit it; the same on every rank.
    """
    decided, problems = _decide_all({_ANY: dtensor}, _rule_for_any(layout))
    if problems:
        raise refusal("full_tensor", problems)
    return _gather(dtensor, *decided[_ANY])


def distribute_tensor(
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    layout: ShardOrder | None = None,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A DTensor of a full tensor. Collective over the mesh, unless ``src_data_rank`` is ``None``.

    Where placements can be read in two ways that local shapes tell apart (uneven ``_StridedShard``), the shards are
    made in FSDP2's nested order, which is also how ``DTensor.full_tensor`` reads them.

    Args:
        full: The global tensor; its values count on the source rank only, its shape and dtype on every rank.
        mesh: The ranks; all of them call.
        placements: One per mesh axis; Shard, _StridedShard or Replicate.
        layout: The order of sharding, where placements cannot say it. State it again when the tensor is saved.
        src_data_rank: Coordinate, on every mesh axis, of the rank whose values are sent; ``None``: each rank takes its
            shard from its own ``full``, without communication.

    Raises:
        LayoutError: The placements can be read in two ways that local shapes do not tell apart, or are unknown.
    """
    describer = Describer(_rule_for_any(layout))
    report = describer.describe_placements(_ANY, full.shape, mesh, placements)
    steps = report if isinstance(report, Problem) else _tellable_steps(_ANY, report)
    if isinstance(report, Problem) or isinstance(steps, Problem):
        raise refusal("distribute_tensor", [report if isinstance(report, Problem) else steps])  # type: ignore[list-item]
    if mesh.get_coordinate() is None:
        local = full.new_empty(0)
    else:
        source = _plain_memory(full.detach())
        if src_data_rank is not None:
            source = source.to(_mesh_device(mesh, source), copy=True)
            broadcast_bytes(mesh, as_bytes(source), src_data_rank)
        local = ops.pack_shard(source, shard_of(report, steps))
    stride = torch.empty(full.shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)
    dtensor.requires_grad_(full.requires_grad)
    return dtensor


def get_full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    layouts: Mapping[str, ShardOrder] | None = None,
) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a model, streamed tensor by tensor. Collective over the meshes of its DTensors.

    Args:
        model: Any mix of DTensors and plain tensors. Wrapper prefixes (``_orig_mod.``, ``_checkpoint_wrapped_module.``,
            DDP's ``module.``) are stripped.
        rank0_only: Only global rank 0 keeps the tensors; others return an empty dict.
        cpu_offload: Results are on the CPU.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Returns:
        Canonical fqn to full tensor; plain tensors are copied too.
    """
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    values = {fqn: value for fqn, value in _canonical_state(model).items() if is_on_mesh(value)}
    decided, problems = _decide_all(values, LayoutRules(layouts))
    if problems:
        raise refusal("get_full_state_dict", problems)
    full_state_dict: dict[str, torch.Tensor] = {}
    for fqn, value in values.items():
        full = _gather(value, *decided[fqn])
        if keeps:
            full_state_dict[fqn] = full.cpu() if cpu_offload else full
    return full_state_dict


def set_full_state_dict(
    model: nn.Module,
    full_state_dict: Mapping[str, torch.Tensor],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
    cast: CastPolicy = "exact",
    layouts: Mapping[str, ShardOrder] | None = None,
) -> None:
    """Writes an unsharded state dict into a model, in place on the local tensors. Collective over all ranks.

    Nothing is written before all ranks have agreed that everything fits.

    Args:
        model: Any mix of DTensors and plain tensors on real devices.
        full_state_dict: Canonical fqn to full tensor; with ``broadcast_from_rank0`` only global rank 0's counts.
        broadcast_from_rank0: Send rank 0's values, tensor by tensor, instead of reading each rank's own.
        strict: Refuse missing and unexpected keys.
        cast: Dtype changes that are allowed, as in ``LoadPlanner``.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Raises:
        StateRefusedError: (a subclass) the same on every rank, naming every key that does not fit; nothing was written.
    """
    targets = _canonical_state(model)
    own = {fqn: (tuple(value.shape), value.dtype) for fqn, value in full_state_dict.items()}
    offered = _from_rank0(own) if broadcast_from_rank0 else own
    wanted = {fqn: value for fqn, value in targets.items() if fqn in offered and is_on_mesh(value)}
    decided, problems = _decide_all(wanted, LayoutRules(layouts))
    problems += [*_key_problems(targets, offered, strict), *_fit_problems(wanted, offered, cast)]
    problems, wanted_anywhere = _gather_over_ranks(problems, list(wanted))
    if problems:
        raise refusal("set_full_state_dict", problems)
    for fqn, (shape, dtype) in offered.items():
        if broadcast_from_rank0:
            if fqn not in wanted_anywhere:
                continue
            full = _broadcast_from_rank0(full_state_dict.get(fqn), shape, dtype)
        else:
            full = full_state_dict[fqn].detach()
        if fqn in wanted:
            local = local_tensor(wanted[fqn])
            if local.numel() > 0:
                local.copy_(ops.pack_shard(full, shard_of(*decided[fqn])))
                torch.autograd.graph.increment_version(wanted[fqn])


_ANY = "tensor"  # how messages name a tensor that came without a key


def _rule_for_any(layout: ShardOrder | None) -> LayoutRules:
    return LayoutRules({} if layout is None else {_ANY: layout})


def _decide_all(values: Mapping[str, torch.Tensor], rules: LayoutRules) -> tuple[dict[str, Decided], list[Problem]]:
    """The layouts of tensors that this rank holds a part of. Collective over the meshes of the DTensors among them."""
    describer = Describer(rules)
    described = {fqn: describer.describe(fqn, value) for fqn, value in values.items()}
    by_mesh: dict[DeviceMesh, list[str]] = {}
    decided: dict[str, Decided] = {}
    problems: list[Problem] = []
    for fqn, value in values.items():
        report = described[fqn]
        if isinstance(value, DTensor):
            by_mesh.setdefault(value.device_mesh, []).append(fqn)
        elif isinstance(report, ShardReport):
            decided[fqn] = (report, ())
    for mesh, fqns in by_mesh.items():
        per_rank = all_gather_values(mesh, [described[fqn] for fqn in fqns])
        for fqn, *reports in zip(fqns, *per_rank, strict=True):
            problem = next((report for report in reports if isinstance(report, Problem)), None)
            steps = decide(fqn, reports) if problem is None else problem
            own = described[fqn]
            if isinstance(steps, Problem) or isinstance(own, Problem):
                problems.append(steps)  # type: ignore[arg-type]  # a rank's own problem is among the reports
            else:
                decided[fqn] = (own, steps)
    return decided, problems


def _gather(value: torch.Tensor, report: ShardReport, steps: Steps) -> torch.Tensor:
    """The global tensor on every rank, new. Collective over the mesh of a DTensor."""
    local = _plain_memory(local_tensor(value))
    if not isinstance(value, DTensor):
        return local.clone()
    assert report.mesh is not None
    full = local.new_empty(report.global_shape)
    if full.numel() == 0:
        return full
    axes = [axis for axis, (dim, _) in enumerate(report.placements) if dim >= 0]
    positions = mesh_coordinates([report.mesh.shape[axis] for axis in axes])
    shards = [shard_of(_report_at(report, axes, position), steps) for position in positions]
    itemsize = local.element_size()
    num_bytes = [num_elements(shard.sizes) * itemsize for shard in shards]
    flat = torch.zeros(max(num_bytes), dtype=torch.uint8, device=_mesh_device(value.device_mesh, local))
    flat[: local.numel() * itemsize].copy_(as_bytes(local))
    rows = all_gather_bytes(value.device_mesh, flat, axes).to(local.device)
    for row, shard, shard_bytes in zip(rows, shards, num_bytes, strict=True):
        if shard.chunks:
            ops.unpack_shard_(full, row[:shard_bytes].view(local.dtype).view(shard.sizes), shard)
    return full


def _plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where its memory does not hold its elements one after another as they are."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _report_at(report: ShardReport, axes: Sequence[int], position: Sequence[int]) -> ShardReport:
    coordinate = list(report.coordinate)
    for axis, index in zip(axes, position, strict=True):
        coordinate[axis] = index
    return replace(report, coordinate=tuple(coordinate))


def _tellable_steps(fqn: str, report: ShardReport) -> Steps | Problem:
    """The first candidate, if the local shapes that it makes tell it from the others."""
    assert report.mesh is not None
    made = (replace(report, coordinate=coordinate) for coordinate in mesh_coordinates(report.mesh.shape))
    return decide(fqn, [replace(other, local_sizes=shard_of(other).sizes) for other in made])


def _canonical_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by canonical fqn; extra state that is no tensor is left out."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {canonical_fqn(fqn): value for fqn, value in inner.state_dict().items() if isinstance(value, torch.Tensor)}


Offer = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _key_problems(targets: Mapping[str, torch.Tensor], offered: Offer, strict: bool) -> list[Problem]:
    if not strict:
        return []
    missing = [
        Problem("missing_key", fqn, "the model has it, the full state dict does not; pass strict=False to leave it")
        for fqn in targets
        if fqn not in offered
    ]
    unexpected = [
        Problem("unclaimed_keys", fqn, "the full state dict has it, the model does not; pass strict=False to skip it")
        for fqn in offered
        if fqn not in targets
    ]
    return missing + unexpected


def _fit_problems(wanted: Mapping[str, torch.Tensor], offered: Offer, cast: CastPolicy) -> list[Problem]:
    problems: list[Problem | None] = []
    for fqn, value in wanted.items():
        shape, dtype = offered[fqn]
        if tuple(value.shape) != shape:
            problems.append(
                Problem("wrong_shape", fqn, f"got {shape} in the full state dict, the model has {tuple(value.shape)}")
            )
        problems.append(cast_problem(fqn, dtype, value.dtype, cast))
        if local_tensor(value).is_meta:
            problems.append(Problem("unsupported_tensor", fqn, "is on the meta device; call to_empty() first"))
    return [problem for problem in problems if problem is not None]


def _from_rank0(offered: Offer) -> Offer:
    box = [offered if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _gather_over_ranks(problems: list[Problem], wanted: list[str]) -> tuple[list[Problem], set[str]]:
    """Every rank's problems without repeats, and the keys that some rank wants; the same on every rank."""
    gathered = gather_values((problems, wanted))
    merged = dict.fromkeys(problem for of_rank, _ in gathered for problem in of_rank)
    return list(merged), {fqn for _, of_rank in gathered for fqn in of_rank}


def _broadcast_from_rank0(full: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    device = dist.distributed_c10d._get_pg_default_device()
    if dist.get_rank() == 0:
        assert full is not None
        sent = _plain_memory(full.detach().to(device))
    else:
        sent = torch.empty(shape, dtype=dtype, device=device)
    if sent.numel() > 0:
        dist.broadcast(as_bytes(sent), src=0)
    return sent


def _mesh_device(mesh: DeviceMesh, local: torch.Tensor) -> torch.device:
    """Where the mesh communicates: the local tensor's device, unless it is offloaded."""
    if local.device.type == mesh.device_type:
        return local.device
    return device_of(mesh.get_group(0), mesh.device_type)
