"""Which tensors are replicas of each other, and along which process groups: from a module's or state dict's placements.

A tensor whose DTensor has ``Replicate`` on mesh axes a < b is synced along a first, then along b; afterwards every rank
has what the rank at coordinate ``src`` on both axes had. So it is a member of two batches, of stage 0 and 1. A batch is
what travels together: tensors on one kind of device with the same group at the same stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from torchtitan_ext.sync.faults import fault_of, inner_tensors
from torchtitan_ext.sync.named_tensors import ModuleOrState, NamedTensor, list_tensors
from torchtitan_ext.sync.options import Options, option_problems

# The axis of a mesh along which ranks hold other parts of a model is called so in torchtitan and PyTorch's examples.
_STAGES = "pp"

BatchKey = tuple[int, tuple[int, ...], str]
"""Stage, global ranks of the group, device type. Sorted by it, batches go in the same order on every rank."""


@dataclass(frozen=True)
class Part:
    """Of a tensor on a mesh that not all ranks are on.

    Attributes:
        mesh_shape: Of the mesh.
        place: This rank's coordinate on the axes that shard, ``None`` on those that replicate.
        stage: The pipeline stage of this rank, where an axis of the whole mesh is called "pp": other stages have
            tensors of their own, which may have the same names.
        num_peers: How many ranks of the call are in that stage; all, where there are no stages.
    """

    mesh_shape: tuple[int, ...]
    place: tuple[int | None, ...]
    stage: int | None
    num_peers: int


@dataclass(frozen=True)
class ReplicaTensor:
    """One rank's replica of a tensor.

    Attributes:
        local: This rank's memory: a plain, detached tensor.
        layout: What else must agree between replicas, as text: global shape and placements.
        replica_set: Equal for all replicas of one shard and for no other: the mesh's ranks, and the coordinate on the
            axes that shard, with ``None`` on those that replicate.
        coordinate: This rank's coordinate on the mesh.
        part: Where other ranks may hold it too, on meshes of their own (``presumed``).
    """

    fqn: str
    local: Tensor
    layout: str
    replica_set: tuple[Any, ...]
    coordinate: tuple[int, ...]
    part: Part | None = None


@dataclass
class Batch:
    """What travels together. ``src`` counts in the group, which sorts its ranks."""

    group: dist.ProcessGroup
    src: int
    tensors: list[ReplicaTensor] = field(default_factory=list)

    @property
    def locals(self) -> list[Tensor]:
        """This rank's memory of each tensor."""
        return [tensor.local for tensor in self.tensors]

    @property
    def names(self) -> list[str]:
        """What must agree between ranks besides dtypes and shapes."""
        return [text for tensor in self.tensors for text in (tensor.fqn, tensor.layout)]


@dataclass
class ListBatch:
    """A ``Batch`` of a plain list of tensors: their positions name them, and thousands need no words of their own.

    Attributes:
        positions: In the list, where some of it are left out because they are tied; else empty.
    """

    group: dist.ProcessGroup
    src: int
    locals: list[Tensor]
    positions: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[ReplicaTensor]:
        ranks = tuple(dist.get_process_group_ranks(self.group))
        positions = self.positions or range(len(self.locals))
        return [
            ReplicaTensor(f"tensors[{position}]", local, "", ranks, ())
            for position, local in zip(positions, self.locals, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        return [str(position) for position in self.positions]


@dataclass
class Replicas:
    """All batches of one rank, the tensors they are made of, each once, and why others are refused.

    Attributes:
        owners: The tensors that the user holds, of which ``tensors`` are the local memory.
        tied: Names of tensors that are left out, because another one has their memory, and that other's name.
        num_listed: Of a plain list, how many tensors it has, tied ones too.
    """

    batches: dict[BatchKey, Batch | ListBatch] = field(default_factory=dict)
    tensors: list[ReplicaTensor] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_listed: int = 0


def collect_replicas(
    source: ModuleOrState, mesh: DeviceMesh | None, options: Options, joined: Collection[str] = ()
) -> Replicas:
    """``find_replicas`` of ``list_tensors``. What goes wrong is a problem in the result: all ranks must hear of it."""
    problems = [*_source_problems(source), *option_problems(options)]
    if problems:
        return Replicas(problems=problems)
    try:
        tensors = list_tensors(source, params=options.params, buffers=options.buffers, ignore=options.ignore)
        return find_replicas(tensors, mesh, options.src, joined)
    except Exception as error:
        return Replicas(problems=[Problem("cannot_sync", "arguments", f"{type(error).__name__}: {error}")])


def _source_problems(source: Any) -> list[Problem]:
    if isinstance(source, (nn.Module, Mapping)):
        return []
    words = "a module, a list of modules or a state dict"
    if isinstance(source, str) or not isinstance(source, Sequence):
        return [Problem("wrong_argument", "module", f"got {described(source)}, expected {words}")]
    return [
        Problem("wrong_argument", f"module[{index}]", f"got {described(part)}, expected a module")
        for index, part in enumerate(source)
        if not isinstance(part, nn.Module)
    ]


def find_replicas(
    tensors: Sequence[NamedTensor], mesh: DeviceMesh | None, src: int, joined: Collection[str] = ()
) -> Replicas:
    """Works out the batches of this rank.

    Args:
        tensors: In the same order on all ranks that share a replica.
        mesh: Where plain tensors are replicated. Without it plain buffers belong to the mesh of the DTensors that holds
            all others' ranks, and plain parameters and entries of state dicts are refused.
        src: Coordinate of the source on every axis that replicates.
        joined: Names of tensors that are replicas along the axes of ``mesh`` too that their own meshes lack.
    """
    found = Replicas()
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
            # Ranks that hold other boxes then hold tensors of other names; padding is neither sent nor compared.
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
            part = None if boxes_layout else replication.part
            replica = ReplicaTensor(fqn, inner, layout, replication.replica_set, replication.coordinate or (), part)
            _add(found, seen, replica, replication)
        if len(found.tensors) > num_known:
            found.owners.append(tensor.value)
    return found


@dataclass(frozen=True)
class _Replication:
    """Where tensors of one mesh and one list of placements have their replicas.

    Attributes:
        placements: As text; empty for plain tensors.
        ranks: Of the mesh, in its order.
        coordinate: Of this rank; ``None`` where it is not on the mesh.
        replica_set: See ``ReplicaTensor``.
        groups: Per mesh axis that replicates and has two and more ranks: the ranks on the line through this one, the
            group, and the source's rank in it.
        problem: Why none of these tensors can be synced.
    """

    placements: str
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    replica_set: tuple[Any, ...] = ()
    groups: tuple[tuple[tuple[int, ...], dist.ProcessGroup, int], ...] = ()
    problem: str | None = None
    part: Part | None = None


class _Replications:
    """The replication of each tensor, made once for all that share it: asking a mesh for each of thousands takes longer
    than to send them."""

    def __init__(self, whole: DeviceMesh | None, scope: DeviceMesh | None, src: int) -> None:
        self._whole = whole
        self._scope = scope
        self._scope_ranks = None if scope is None else frozenset(scope.mesh.flatten().tolist())
        self._src = src
        self._known: dict[Any, _Replication] = {}
        self._replica_sets: dict[Any, tuple[Any, ...]] = {}

    def of(self, value: Tensor, *, is_joined: bool = False) -> _Replication | None:
        """``None`` for a plain tensor where no mesh is known.

        Args:
            is_joined: Whether replicas lie along the axes of the scope too that the tensor's mesh lacks.
        """
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
                problem = f"is replicated {len(line)} times along mesh axis {axis}, src is {self._src}"
                return _Replication(text, ranks, coordinate, problem=problem)
            group = mesh.get_group(axis)
            groups[axis] = (line, group, dist.get_group_rank(group, line[self._src]))
        fixed = tuple(None if axis in groups else place for axis, place in enumerate(coordinate))
        # One object for equal ones of several meshes: comparing them again for each tensor takes long on many ranks.
        replica_set = self._replica_sets.setdefault((ranks, fixed), (ranks, fixed))
        part = None if placements is None else self._part(mesh, frozenset(ranks), fixed)
        return _Replication(text, ranks, coordinate, replica_set, tuple(groups.values()), part=part)

    def _part(self, mesh: DeviceMesh, ranks: frozenset[int], place: tuple[int | None, ...]) -> Part | None:
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
        return Part(tuple(mesh.shape), place, stage, len(peers)) if ranks < peers else None

    def _join(self, own: _Replication) -> _Replication:
        """With the axes of the scope that the mesh lacks; as it was, where it is no slice of the scope."""
        scope, coordinate = self._scope, own.coordinate
        if scope is None or coordinate is None or own.part is None or own.problem is not None:
            return own
        rank, ranks, num_spanned = own.ranks[row_major_position(coordinate, own.part.mesh_shape)], set(own.ranks), 1
        groups = list(own.groups)
        for axis in range(scope.ndim):
            line = tuple(ranks_along(scope, axis))
            if ranks.issuperset(line):
                num_spanned *= len(line)
            elif ranks.intersection(line) != {rank}:
                return own
            elif (scope.mesh_dim_names or {axis: ""})[axis] != _STAGES:
                if not 0 <= self._src < len(line):
                    problem = f"is replicated {len(line)} times along mesh axis {axis}, src is {self._src}"
                    return replace(own, problem=problem)
                group = scope.get_group(axis)
                groups.append((line, group, dist.get_group_rank(group, line[self._src])))
        if num_spanned != len(ranks):
            return own
        # Ranks that do not stand at one place of their meshes would get each other's shards.
        text = f"{own.placements} at {own.part.place} of {own.part.mesh_shape}"
        replica_set = (tuple(scope_ranks(scope)), own.part.stage, own.part.place)
        replica_set = self._replica_sets.setdefault(replica_set, replica_set)
        return replace(own, placements=text, replica_set=replica_set, groups=tuple(groups), part=None)


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


def _add(found: Replicas, seen: dict[Any, str], tensor: ReplicaTensor, replication: _Replication) -> None:
    local = tensor.local
    if local.numel() > 0:
        memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), id(replication.replica_set))
        if memory in seen:
            found.tied[tensor.fqn] = seen[memory]
            return
        seen[memory] = tensor.fqn
    found.tensors.append(tensor)
    for stage, (ranks, group, src) in enumerate(replication.groups):
        found.batches.setdefault((stage, ranks, local.device.type), Batch(group, src)).tensors.append(tensor)
