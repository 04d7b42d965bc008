"""Full tensors from DTensors and back, for every layout that the planners know.

Ranks decide layouts as for a checkpoint (docs/reference/planners.md), in one exchange of key tables per mesh. They then
send shards in parts, straight to their places: a rank holds one full tensor beside its shard, and a few buffers of at
most ``_GATHER_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import NoneType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.tables.agreement import agree
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    KeyTable,
    TensorEntry,
    box_tensors,
    describe_state,
    encode_table,
)
from torchtitan_ext.errors import Problem, argument_error, check_argument, refusal
from torchtitan_ext.layout.dtensor import Describer, as_bytes, describes_itself, local_tensor, local_view
from torchtitan_ext.layout.layout import (
    LayoutRules,
    LocalShard,
    ShardOrder,
    ShardReport,
    Steps,
    decide,
    mesh_coordinates,
    num_elements,
    part_of_shard,
    row_major_position,
    shard_of,
    shard_of_box,
)
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.ranks.exchange import (
    Opening,
    Scope,
    all_gather_bytes,
    broadcast_bytes,
    device_of,
    gather_values,
    scope_ranks,
)

# All ranks together send so much at once. A rank holds two and a half times as much meanwhile, gloo's copies included.
_GATHER_BYTES = 32 << 20

Decided = tuple[ShardReport, Steps]
"""This rank's report and the true sharding order."""


def full_tensor(tensor: torch.Tensor, *, layout: ShardOrder | None = None) -> torch.Tensor:
    """The global tensor, on every rank. Collective over the mesh of a DTensor, and over the default process group for a
    plain tensor that describes its own boxes.

    Unlike ``DTensor.full_tensor`` it is right for uneven strided shards and for shards of several boxes, and it is not
    differentiable.

    Args:
        tensor: A DTensor of any dtype and any layout but Partial, or a tensor that describes its own boxes
            (``CheckpointableTensor``, ShardedTensor, DCP's hooks). A plain tensor is copied. A wrapper subclass (fp8
            weights and their scales) gives the values that its ``copy_`` writes into a plain tensor.
        layout: The order in which the axes were sharded, where placements cannot express it.

    Returns:
        A new contiguous tensor of the global shape on the local tensor's device.

    Raises:
        LayoutError: The layout is in doubt, or the local tensors do not fit it; the same on every rank.
        TypeError: ``tensor`` is no tensor, or ``layout`` no ``ShardOrder``.
    """
    check_argument("full_tensor", "tensor", tensor, torch.Tensor, "a tensor")
    check_argument("full_tensor", "layout", layout, (ShardOrder, NoneType), "a ShardOrder")
    if describes_itself(tensor):
        return _gather_boxes(tensor)
    decided, problems = decide_layouts({_ANY: tensor}, _rule_for_any(layout))
    if problems:
        raise refusal("full_tensor", problems)
    return gather_full(tensor, *decided[_ANY])


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
        full: The global tensor, of the same shape and dtype on every rank; only the source rank's values are used.
        mesh: All its ranks call.
        placements: One per mesh axis; Shard, _StridedShard or Replicate.
        layout: The order of sharding, where placements cannot express it. State it again when the tensor is saved.
        src_data_rank: Coordinate, on every mesh axis, of the rank that sends its values. With ``None`` each rank takes
            its shard from its own ``full``, without communication.

    Raises:
        LayoutError: The placements can be read in two ways that local shapes do not tell apart, or are unknown.
        TypeError: An argument has another type.
    """
    check_argument("distribute_tensor", "full", full, torch.Tensor, "a tensor")
    if isinstance(full, DTensor):
        raise argument_error("distribute_tensor", "full", full, "a plain tensor; redistribute() a DTensor")
    check_argument("distribute_tensor", "mesh", mesh, DeviceMesh, "a DeviceMesh")
    check_argument("distribute_tensor", "layout", layout, (ShardOrder, NoneType), "a ShardOrder")
    shard = placed_shard("distribute_tensor", full.shape, mesh, placements, layout)
    if shard is None:
        local = full.new_empty(0)
    else:
        source = full.detach().resolve_conj().resolve_neg()
        if src_data_rank is not None:
            is_source = all(index == src_data_rank for index in mesh.get_coordinate() or ())
            source = broadcast_full(source if is_source else None, like=source, scope=mesh, src=src_data_rank)
        local = ops.pack_shard(source, shard)
    dtensor = as_dtensor(local, full.shape, mesh, placements)
    dtensor.requires_grad_(full.requires_grad)
    return dtensor


def placed_shard(
    operation: str,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    layout: ShardOrder | None,
) -> LocalShard | None:
    """What placements give this rank of a new tensor; ``None`` where it is not on the mesh. Not collective.

    Raises what ``distribute_tensor`` raises.
    """
    _check_placements(operation, mesh, placements)
    describer = Describer(_rule_for_any(layout))
    report = describer.describe_placements(_ANY, torch.Size(shape), mesh, placements)
    if isinstance(report, Problem):
        raise refusal(operation, [report])
    steps = _decided_by_shapes(report)
    if isinstance(steps, Problem):
        raise refusal(operation, [steps])
    return None if mesh.get_coordinate() is None else shard_of(report, steps)


def as_dtensor(local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of a global shape with this local tensor, row-major. Not collective."""
    stride = torch.empty(shape, dtype=local.dtype, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# Of all functions here, which may call each other.
_OPENING = Opening("full_tensor", "layouts of full tensors")

_ANY = "tensor"  # messages give this name to a tensor that came without a key


def _rule_for_any(layout: ShardOrder | None) -> LayoutRules:
    return LayoutRules({} if layout is None else {_ANY: layout})


def _check_placements(operation: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    check_argument(operation, "placements", placements, Sequence, "a list of placements")
    for placement in placements:
        check_argument(operation, "placements", placement, Placement, "Shard, Replicate or _StridedShard objects")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{operation}: placements: got {len(placements)}, expected one per axis of the mesh, {mesh.ndim}"
        )


def decide_layouts(values: Mapping[str, torch.Tensor], rules: LayoutRules) -> tuple[dict[str, Decided], list[Problem]]:
    """The layouts of tensors that this rank holds a part of, and the problems of all ranks of their meshes.

    Collective over the meshes of the DTensors. Problems count ranks on the mesh. Plain tensors that describe their own
    boxes are refused: nothing says which ranks hold the other boxes.
    """
    describer = Describer(rules)
    of_mesh: dict[DeviceMesh, dict[str, ShardReport | Problem]] = {}
    decided: dict[str, Decided] = {}
    problems: list[Problem] = []
    for fqn, value in values.items():
        if isinstance(value, DTensor):
            of_mesh.setdefault(value.device_mesh, {})[fqn] = describer.describe(fqn, value)
        elif describes_itself(value):
            detail = (
                "describes its own boxes, which full state dicts do not follow; call full_tensor on it, or load into it"
            )
            problems.append(Problem("unsupported_tensor", fqn, detail))
        elif isinstance(report := describer.describe(fqn, value), ShardReport):
            decided[fqn] = (report, ())
    of_this_rank = list(problems)
    for mesh, described in of_mesh.items():
        reports = {fqn: report for fqn, report in described.items() if isinstance(report, ShardReport)}
        entries = {fqn: TensorEntry(report, values[fqn].dtype, requires_grad=False) for fqn, report in reports.items()}
        refused = [report for report in described.values() if isinstance(report, Problem)]
        table = KeyTable(entries, problems=(*of_this_rank, *refused))
        agreement = agree(gather_values(encode_table(table).message, mesh, opening=_OPENING), needs_all_ranks=False)
        problems += agreement.problems
        rank = row_major_position(mesh.get_coordinate() or (), mesh.shape)
        decided.update({fqn: (reports[fqn], steps) for fqn, steps in agreement.joint.steps_of(rank).items()})
    return decided, problems


_ShardPart = tuple[tuple[int, ...], LocalShard]
"""Where a part of a local tensor begins in it, and the part as a shard of its own."""


def gather_full(value: torch.Tensor, report: ShardReport, steps: Steps) -> torch.Tensor:
    """The global tensor on every rank, new. Collective over the mesh of a DTensor."""
    local = dense_values(local_tensor(value)).resolve_conj().resolve_neg()
    axes = [axis for axis, (dim, _) in enumerate(report.placements) if dim >= 0]
    if not isinstance(value, DTensor) or not axes:
        return local.clone(memory_format=torch.contiguous_format)
    assert report.mesh is not None
    full = local.new_empty(report.global_shape)
    if full.numel() == 0:
        return full
    positions = mesh_coordinates([report.mesh.shape[axis] for axis in axes])
    shards = [shard_of(_report_at(report, axes, position), steps) for position in positions]
    own = positions.index(tuple(report.coordinate[axis] for axis in axes))
    part_elements = max(1, _GATHER_BYTES // (len(shards) * local.element_size()))
    parts_of = [_parts(shard, part_elements) for shard in shards]
    own_parts = (local_view(local, at, part.sizes) for at, part in _parts(shards[own], part_elements))
    _exchange_parts(full, parts_of, own_parts, value.device_mesh, axes)
    return full


def _exchange_parts(
    full: torch.Tensor,
    parts_of: Sequence[Iterable[_ShardPart]],
    own: Iterable[torch.Tensor],
    scope: Scope,
    axes: Sequence[int],
) -> None:
    """Fills a full tensor with the parts of all ranks, one part of each rank at a time. Collective over the scope.

    ``parts_of`` is in the order of ``all_gather_bytes`` along ``axes``; ``own`` is this rank's memory of its parts.
    """
    own, device = iter(own), _device_of(scope, full)
    for parts in zip_longest(*parts_of):
        num_bytes = [0 if part is None else num_elements(part[1].sizes) * full.element_size() for part in parts]
        flat = torch.zeros(max(num_bytes), dtype=torch.uint8, device=device)
        local = next(own, None)
        if local is not None:
            flat[: local.nbytes].copy_(as_bytes(local))
        rows = all_gather_bytes(scope, flat, axes).to(full.device)
        for row, part, part_bytes in zip(rows, parts, num_bytes, strict=True):
            if part is not None and part[1].chunks:
                ops.unpack_shard_(full, row[:part_bytes].view(full.dtype).view(part[1].sizes), part[1])


def _gather_boxes(value: torch.Tensor) -> torch.Tensor:
    """A new global tensor on every rank, from a tensor that describes its own boxes.

    The first rank that holds a box sends it. Collective over the mesh of a DTensor, else over the default group.
    """
    scope = value.device_mesh if isinstance(value, DTensor) else None
    table = describe_state({_ANY: value}, {}, LayoutRules({}))
    tables = gather_values(encode_table(table).message, scope, opening=_OPENING)
    agreement = agree(tables, needs_all_ranks=True)
    if agreement.problems:
        raise refusal("full_tensor", agreement.problems)
    entry = table.entries[_ANY]
    assert isinstance(entry, BoxesEntry)
    full = torch.empty(entry.global_shape, dtype=entry.dtype, device=value.device)
    if full.numel() == 0:
        return full
    part_elements = max(1, _GATHER_BYTES // (len(tables) * full.element_size()))
    parts_of: list[list[_ShardPart]] = [[] for _ in tables]
    local_of = dict(zip(entry.boxes, box_tensors(value, entry), strict=True))
    own_parts: list[torch.Tensor] = []
    own = scope_ranks(scope).index(dist.get_rank()) if dist.is_initialized() else 0
    (replica,) = agreement.joint.replicas(0)
    for held in replica.shards:
        offsets, sizes = held.boxes[0]
        shard = shard_of_box(offsets, sizes)
        for part in _parts(shard, part_elements):
            parts_of[held.ranks[0]].append(part)
            if held.ranks[0] == own:
                local = local_of[held.boxes[0]].resolve_conj().resolve_neg()
                own_parts.append(local_view(local, part[0], part[1].sizes))
    _exchange_parts(full, parts_of, own_parts, scope, () if scope is None else range(scope.ndim))
    return full


def _parts(shard: LocalShard, max_elements: int) -> Iterator[_ShardPart]:
    for offsets, sizes in _core.BoxParts((0,) * len(shard.sizes), shard.sizes, max_elements):
        yield offsets, part_of_shard(shard, offsets, sizes)


def broadcast_full(full: torch.Tensor | None, *, like: torch.Tensor, scope: Scope = None, src: int = 0) -> torch.Tensor:
    """The full tensor of the source rank, on every rank of a scope; new tensors on the other ranks. Collective.

    ``full`` is ``None`` on the other ranks; ``like`` has its shape and dtype, perhaps on meta.
    """
    device = _device_of(scope, like)
    if full is None:
        flat = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=device)
    else:
        flat = as_bytes(full.detach().to(device))
    broadcast_bytes(flat, scope, src=src)
    return flat.view(like.dtype).view(like.shape)


def _report_at(report: ShardReport, axes: Sequence[int], position: Sequence[int]) -> ShardReport:
    coordinate = list(report.coordinate)
    for axis, index in zip(axes, position, strict=True):
        coordinate[axis] = index
    return replace(report, coordinate=tuple(coordinate))


def _decided_by_shapes(report: ShardReport) -> Steps | Problem:
    """The first candidate order, if the local shapes that it makes rule out the others."""
    assert report.mesh is not None
    made = (replace(report, coordinate=coordinate) for coordinate in mesh_coordinates(report.mesh.shape))
    return decide(_ANY, [replace(other, local_sizes=shard_of(other).sizes) for other in made])


def _device_of(scope: Scope, tensor: torch.Tensor) -> torch.device:
    """Where a scope communicates: a mesh on the tensor's device, unless the tensor is offloaded."""
    if not isinstance(scope, DeviceMesh):
        group = dist.group.WORLD if scope is None else scope
        return torch.device("cpu") if group is None else device_of(group)
    is_there = tensor.device.type == scope.device_type
    return tensor.device if is_there else device_of(scope.get_group(0), scope.device_type)
