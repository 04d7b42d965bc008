"""Finds the tensors of a module or state dict that are replicas, and their process groups, by their placements.

A DTensor with ``Replicate`` on mesh axes a < b is sent along a first, then along b; afterwards every rank has what the
rank at coordinate ``src`` on both axes had. So the tensor is in two batches, of round 0 and 1. A batch has the tensors
on one kind of device that have the same group in the same round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torchtitan_ext.errors import Problem, described
from torchtitan_ext.layout.dtensor import local_tensor, local_view, root_mesh
from torchtitan_ext.layout.layout import row_major_position
from torchtitan_ext.layout.own_boxes import has_own_boxes, own_boxes, why_not_own_boxes
from torchtitan_ext.ranks.exchange import ranks_along, scope_ranks
from torchtitan_ext.sync.batches import Batch, MeshSlice, ReplicaBatches, ReplicaTensor
from torchtitan_ext.sync.calls import ModuleCall
from torchtitan_ext.sync.tensors import ModuleOrState, NamedTensor, fault_of, inner_tensors, list_tensors

# torchtitan and PyTorch's examples give this name to the mesh axis along which ranks hold other parts of a model.
_STAGES = "pp"


def collect_replicas(
    source: ModuleOrState, call: ModuleCall, *, src: int = 0, joined: Collection[str] = ()
) -> ReplicaBatches:
    """The batches of this rank. Whatever fails becomes a problem in the result: every rank must get it.

    If the call has no mesh, plain buffers belong to the DTensors' mesh that holds all ranks of the other meshes, and
    plain parameters and entries of state dicts are refused. Tensors of the names ``joined`` are replicas along the mesh
    axes, too, that their own meshes lack.
    """
    problems = [*_source_problems(source), *call.problems()]
    if problems:
        return ReplicaBatches(problems=problems)
    try:
        return _find_replicas(list_tensors(source, call), call.scope, src, joined)
    except Exception as error:
        return ReplicaBatches(problems=[Problem("cannot_sync", "arguments", f"{type(error).__name__}: {error}")])


def _source_problems(source: Any) -> list[Problem]:
    if isinstance(source, (nn.Module, Mapping)):
        return []
    if isinstance(source, str) or not isinstance(source, Sequence):
        what = f"got {described(source)}, expected a module, a list of modules or a state dict"
        return [Problem("wrong_argument", "module", what)]
    return [
        Problem("wrong_argument", f"module[{index}]", f"got {described(part)}, expected a module")
        for index, part in enumerate(source)
        if not isinstance(part, nn.Module)
    ]


def _find_replicas(
    tensors: Sequence[NamedTensor], mesh: DeviceMesh | None, src: int, joined: Collection[str]
) -> ReplicaBatches:
    """``tensors`` are in the same order on all ranks that share a replica."""
    found = ReplicaBatches()
    replications = _Replications(mesh if mesh is not None else _widest_mesh(tensors), mesh, src)
    seen: dict[Any, str] = {}
    named: dict[str, Tensor] = {}
    for tensor in tensors:
        if named.setdefault(tensor.fqn, tensor.value) is not tensor.value:
            twice = "stands for two tensors, whose names differ only in what wrappers add; rename one of them"
            found.problems.append(Problem("cannot_sync", tensor.fqn, twice))
            continue
        replication = replications.of(tensor.value)
        if replication is not None and replication.coordinate is None and isinstance(tensor.value, DTensor):
            continue
        local = local_tensor(tensor.value)
        reason = _refusal(tensor, mesh, replication) or fault_of(local) or why_not_own_boxes(tensor.value)
        if reason is not None:
            found.problems.append(Problem("cannot_sync", tensor.fqn, reason))
            continue
        assert replication is not None, "a tensor without a mesh was not refused, please report"
        boxes_layout = ""
        parts = list(inner_tensors(tensor.fqn, local))
        if has_own_boxes(tensor.value):
            # Each box is a tensor of its own name, so that padding is neither sent nor compared.
            shape, chunks = own_boxes(tensor.value)
            boxes_layout = f"a box of a tensor of shape {shape}"
            parts = [
                (f"{tensor.fqn} at {chunk.offsets}", local_view(local, chunk.local_offsets, chunk.sizes))
                for chunk in chunks
            ]
        num_known = len(found.tensors)
        for fqn, inner in parts:
            if fqn in joined:
                replication = replications.of(tensor.value, is_joined=True)
                assert replication is not None
                if replication.problem is not None:
                    found.problems.append(Problem("cannot_sync", fqn, replication.problem))
                    continue
            text = replication.placements
            layout = boxes_layout or (f"global shape {tuple(tensor.value.shape)}, {text}" if text else "")
            mesh_slice = None if boxes_layout else replication.mesh_slice
            coordinate = replication.coordinate or ()
            replica = ReplicaTensor(fqn, inner, layout, replication.replica_set, coordinate, mesh_slice)
            _add(found, seen, replica, replication)
        if len(found.tensors) > num_known:
            found.owners.append(tensor.value)
    return found


@dataclass(frozen=True)
class _Replication:
    """Where tensors of one mesh and one list of placements have their replicas, or why none of them can be synced.

    Attributes:
        placements: The placements as text; empty for plain tensors.
        coordinate: This rank's coordinate; ``None`` where it is not on the mesh.
        groups: For each mesh axis that replicates over two or more ranks: the ranks on the line through this one, their
            group, and the source's rank in it.
    """

    placements: str
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    replica_set: tuple[Any, ...] = ()
    groups: tuple[tuple[tuple[int, ...], dist.ProcessGroup, int], ...] = ()
    problem: str | None = None
    mesh_slice: MeshSlice | None = None


class _Replications:
    """The replications of all tensors. Tensors with one mesh and one list of placements share one: to ask a mesh again
    for each of thousands of tensors takes longer than to send them."""

    def __init__(self, whole: DeviceMesh | None, scope: DeviceMesh | None, src: int) -> None:
        self._whole = whole
        self._scope = scope
        self._scope_ranks = None if scope is None else frozenset(scope.mesh.flatten().tolist())
        self._src = src
        self._known: dict[Any, _Replication] = {}
        self._replica_sets: dict[Any, tuple[Any, ...]] = {}

    def of(self, value: Tensor, *, is_joined: bool = False) -> _Replication | None:
        """``None`` for a plain tensor where no mesh is known. See ``collect_replicas`` for joined tensors."""
        mesh, placements = (value.device_mesh, value.placements) if isinstance(value, DTensor) else (self._whole, None)
        if mesh is None:
            return None
        key = (id(mesh), placements, is_joined)
        if key not in self._known:
            made = self._make(mesh, placements)
            self._known[key] = self._join(made) if is_joined else made
        return self._known[key]

    def _make(self, mesh: DeviceMesh, placements: tuple[Placement, ...] | None) -> _Replication:
        text = "" if placements is None else str(placements)
        ranks = tuple(mesh.mesh.flatten().tolist())
        position = mesh.get_coordinate()
        coordinate = None if position is None else tuple(position)
        for placement in placements or ():
            if isinstance(placement, Partial):
                problem = f"holds {placement!r}, values still to be reduced; redistribute it first"
                return _Replication(text, ranks, coordinate, problem=problem)
        if self._scope_ranks is not None and not self._scope_ranks.issuperset(ranks):
            problem = "lives on a mesh that reaches beyond the mesh passed; pass one that holds all ranks of the module"
            return _Replication(text, ranks, coordinate, problem=problem)
        if coordinate is None:
            return _Replication(text, ranks, None)
        groups = {}
        for axis in range(mesh.ndim):
            line = tuple(ranks_along(mesh, axis))
            if len(line) == 1 or (placements is not None and not isinstance(placements[axis], Replicate)):
                continue
            if not 0 <= self._src < len(line):
                return _Replication(text, ranks, coordinate, problem=self._src_problem(axis, line))
            groups[axis] = self._group_along(mesh, axis, line)
        fixed = tuple(None if axis in groups else place for axis, place in enumerate(coordinate))
        # Equal sets of several meshes are one object: to compare them again for each tensor takes long on many ranks.
        replica_set = self._replica_sets.setdefault((ranks, fixed), (ranks, fixed))
        mesh_slice = None if placements is None else self._slice_of(mesh, frozenset(ranks), fixed)
        return _Replication(text, ranks, coordinate, replica_set, tuple(groups.values()), mesh_slice=mesh_slice)

    def _src_problem(self, axis: int, line: Sequence[int]) -> str:
        return f"is replicated {len(line)} times along mesh axis {axis}, src is {self._src}"

    def _group_along(
        self, mesh: DeviceMesh, axis: int, line: tuple[int, ...]
    ) -> tuple[tuple[int, ...], dist.ProcessGroup, int]:
        group = mesh.get_group(axis)
        return line, group, dist.get_group_rank(group, line[self._src])

    def _slice_of(self, mesh: DeviceMesh, ranks: frozenset[int], place: tuple[int | None, ...]) -> MeshSlice | None:
        peers = frozenset(scope_ranks()) if self._scope_ranks is None else self._scope_ranks
        stage = None
        for whole in (root_mesh(mesh), self._scope):
            coordinate = None if whole is None else whole.get_coordinate()
            names = () if whole is None else whole.mesh_dim_names or ()
            if whole is not None and coordinate is not None and _STAGES in names:
                axis = names.index(_STAGES)
                stage = coordinate[axis]
                peers = peers.intersection(whole.mesh.select(axis, stage).flatten().tolist())
                break
        return MeshSlice(tuple(mesh.shape), place, stage, len(peers)) if ranks < peers else None

    def _join(self, own: _Replication) -> _Replication:
        """Adds the axes of the scope that the mesh lacks; a mesh that is no slice of the scope stays as it is."""
        scope, coordinate = self._scope, own.coordinate
        if scope is None or coordinate is None or own.mesh_slice is None or own.problem is not None:
            return own
        rank, ranks, num_spanned = own.ranks[row_major_position(coordinate, own.mesh_slice.shape)], set(own.ranks), 1
        groups = list(own.groups)
        for axis in range(scope.ndim):
            line = tuple(ranks_along(scope, axis))
            if ranks.issuperset(line):
                num_spanned *= len(line)
            elif ranks.intersection(line) != {rank}:
                return own
            elif (scope.mesh_dim_names or {axis: ""})[axis] != _STAGES:
                if not 0 <= self._src < len(line):
                    return replace(own, problem=self._src_problem(axis, line))
                groups.append(self._group_along(scope, axis, line))
        if num_spanned != len(ranks):
            return own
        # Only ranks at one place of their meshes hold the same shard.
        text = f"{own.placements} at {own.mesh_slice.place} of {own.mesh_slice.shape}"
        replica_set = (tuple(scope_ranks(scope)), own.mesh_slice.stage, own.mesh_slice.place)
        replica_set = self._replica_sets.setdefault(replica_set, replica_set)
        return replace(own, placements=text, replica_set=replica_set, groups=tuple(groups), mesh_slice=None)


def _widest_mesh(tensors: Sequence[NamedTensor]) -> DeviceMesh | None:
    values = [tensor.value for tensor in tensors]
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    if not meshes:
        return None
    widest = max(meshes.values(), key=lambda mesh: mesh.size())
    ranks = set(widest.mesh.flatten().tolist())
    if all(ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes.values()):
        return widest
    return None


def _refusal(tensor: NamedTensor, scope: DeviceMesh | None, replication: _Replication | None) -> str | None:
    if scope is None and not isinstance(tensor.value, DTensor):
        if tensor.kind != "buffer":
            return (
                f"is a plain {'parameter' if tensor.kind == 'param' else 'tensor'}: it may be a replica or this rank's "
                "own (a local expert, hand-made tensor parallelism); pass mesh= if its ranks must hold the same, or "
                "ignore it"
            )
        if replication is None:
            return "is a plain buffer, and no mesh says between which ranks it is replicated; pass mesh= or ignore it"
    return None if replication is None else replication.problem


def _add(found: ReplicaBatches, seen: dict[Any, str], tensor: ReplicaTensor, replication: _Replication) -> None:
    local = tensor.local
    if local.numel() > 0:
        memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), id(replication.replica_set))
        if memory in seen:
            found.tied[tensor.fqn] = seen[memory]
            return
        seen[memory] = tensor.fqn
    found.tensors.append(tensor)
    for round_, (ranks, group, src) in enumerate(replication.groups):
        found.batches.setdefault((round_, ranks, local.device.type), Batch(group, src)).tensors.append(tensor)
