"""Which tensors are replicas of each other, and along which process groups: from a module's or state dict's placements.

A tensor whose DTensor has ``Replicate`` on mesh axes a < b is synced along a first, then along b; afterwards every rank
has what the rank at coordinate ``src`` on both axes had. So it is a member of two batches, of stage 0 and 1. A batch is
what travels together: tensors on one kind of device with the same group at the same stage.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.rules import canonical_fqn
from torchtitan_ext.ranks.exchange import ranks_along
from torchtitan_ext.state.nested import flatten_state_dict

Buffers = Literal["all", "persistent", "none"]
Source = nn.Module | Sequence[nn.Module] | Mapping[str, Any]
BatchKey = tuple[int, tuple[int, ...], str]
"""Stage, global ranks of the group, device type. Sorted by it, batches go in the same order on every rank."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a module or state dict. ``kind`` decides whether a plain one may be taken for a replica."""

    fqn: str
    value: Tensor
    kind: Literal["param", "buffer", "state"]


@dataclass(frozen=True)
class ReplicaTensor:
    """One rank's replica of a tensor.

    Attributes:
        local: This rank's memory: a plain, detached tensor.
        layout: What else must agree between replicas, as text: global shape and placements.
        replica_set: Equal for all replicas of one shard and for no other: the mesh's ranks, and the coordinate on the
            axes that shard, with ``None`` on those that replicate.
        coordinate: This rank's coordinate on the mesh.
    """

    fqn: str
    local: Tensor
    layout: str
    replica_set: tuple[Any, ...]
    coordinate: tuple[int, ...]


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
    """A ``Batch`` of a plain list of tensors: their positions name them, and thousands need no words of their own."""

    group: dist.ProcessGroup
    src: int
    locals: list[Tensor]

    @property
    def tensors(self) -> list[ReplicaTensor]:
        ranks = tuple(dist.get_process_group_ranks(self.group))
        return [ReplicaTensor(listed_fqn(index), local, "", ranks, ()) for index, local in enumerate(self.locals)]

    @property
    def names(self) -> list[str]:
        return []


@dataclass
class Replicas:
    """All batches of one rank, the tensors they are made of, each once, and why others are refused."""

    batches: dict[BatchKey, Batch | ListBatch] = field(default_factory=dict)
    tensors: list[ReplicaTensor] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def collect_replicas(
    source: Source, mesh: DeviceMesh | None, src: int, *, params: bool, buffers: Buffers, ignore: Collection[str]
) -> Replicas:
    """``find_replicas`` of ``list_tensors``. What goes wrong is a problem in the result: all ranks must hear of it."""
    try:
        if buffers not in ("all", "persistent", "none"):
            raise ValueError(f'buffers is {buffers!r}, expected "all", "persistent" or "none"')
        is_list = isinstance(ignore, Collection) and not isinstance(ignore, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in ignore):
            raise ValueError(f"ignore is {ignore!r}, expected a list of names or globs")
        if not isinstance(src, int):
            raise ValueError(f"src is {src!r}, expected a coordinate")
        return find_replicas(list_tensors(source, params=params, buffers=buffers, ignore=ignore), mesh, src)
    except Exception as error:
        return Replicas(problems=[Problem("cannot_sync", "arguments", f"{type(error).__name__}: {error}")])


def list_tensors(source: Source, *, params: bool, buffers: Buffers, ignore: Collection[str]) -> list[NamedTensor]:
    """The tensors of a module, of pipeline parts or of a nested state dict, in order, by canonical name.

    FSDP2 modules are resharded first: what is written into unsharded parameters vanishes at the next reshard.

    Args:
        params: Whether parameters of modules are listed.
        buffers: Which buffers of modules are listed.
        ignore: Names or globs that are left out.
    """
    named: list[NamedTensor] = []
    if isinstance(source, Mapping):
        flat = flatten_state_dict(source, walk_wrappers=False).values
        named = [
            NamedTensor(canonical_fqn(fqn), value, "state") for fqn, value in flat.items() if isinstance(value, Tensor)
        ]
    elif isinstance(source, nn.Module):
        named = list(_tensors_of_module(source, params, buffers))
    else:
        for index, part in enumerate(source):
            named += [
                NamedTensor(f"{index}.{tensor.fqn}", tensor.value, tensor.kind)
                for tensor in _tensors_of_module(part, params, buffers)
            ]
    return [tensor for tensor in named if not _is_ignored(tensor.fqn, ignore)]


def _is_ignored(fqn: str, ignore: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in ignore)


def _tensors_of_module(module: nn.Module, params: bool, buffers: Buffers) -> Iterator[NamedTensor]:
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if params:
        for fqn, param in module.named_parameters():
            yield NamedTensor(canonical_fqn(fqn), param, "param")
    if buffers == "none":
        return
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }
    for fqn, buffer in module.named_buffers():
        if buffers == "all" or fqn not in transient:
            yield NamedTensor(canonical_fqn(fqn), buffer, "buffer")


def find_replicas(tensors: Sequence[NamedTensor], mesh: DeviceMesh | None, src: int) -> Replicas:
    """Works out the batches of this rank.

    Args:
        tensors: In the same order on all ranks that share a replica.
        mesh: Where plain tensors are replicated. Without it plain buffers belong to the mesh of the DTensors that holds
            all others' ranks, and plain parameters and entries of state dicts are refused.
        src: Coordinate of the source on every axis that replicates.
    """
    found = Replicas()
    homes = _Homes(mesh if mesh is not None else _widest_mesh(tensors), mesh, src)
    seen: set[Any] = set()
    named: dict[str, Tensor] = {}
    for tensor in tensors:
        if named.setdefault(tensor.fqn, tensor.value) is not tensor.value:
            twice = "stands for two tensors, whose names differ only in what wrappers add; rename one of them"
            found.problems.append(Problem("cannot_sync", tensor.fqn, twice))
            continue
        home = homes.of(tensor.value)
        if home is not None and home.coordinate is None and isinstance(tensor.value, DTensor):
            continue
        local = local_tensor(tensor.value)
        reason = _refusal(tensor, mesh, home) or _unsyncable(local)
        if reason is not None:
            found.problems.append(Problem("cannot_sync", tensor.fqn, reason))
            continue
        assert home is not None, "a tensor without a mesh was not refused, please report"
        layout = f"global shape {tuple(tensor.value.shape)}, {home.placements}" if home.placements else ""
        num_known = len(found.tensors)
        for fqn, inner in inner_tensors(tensor.fqn, local):
            _add(found, seen, ReplicaTensor(fqn, inner, layout, home.replica_set, home.coordinate or ()), home)
        if len(found.tensors) > num_known:
            found.owners.append(tensor.value)
    return found


@dataclass(frozen=True)
class _Home:
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


class _Homes:
    """The home of each tensor, made once for all that share it: asking a mesh for each of thousands takes longer than
    to send them."""

    def __init__(self, whole: DeviceMesh | None, scope: DeviceMesh | None, src: int) -> None:
        self._whole = whole
        self._scope_ranks = None if scope is None else frozenset(scope.mesh.flatten().tolist())
        self._src = src
        self._known: dict[Any, _Home] = {}
        self._replica_sets: dict[Any, tuple[Any, ...]] = {}

    def of(self, value: Tensor) -> _Home | None:
        """``None`` for a plain tensor where no mesh is known."""
        mesh, placements = (value.device_mesh, value.placements) if isinstance(value, DTensor) else (self._whole, None)
        if mesh is None:
            return None
        key = (id(mesh), placements)
        if key not in self._known:
            self._known[key] = self._make(mesh, placements)
        return self._known[key]

    def _make(self, mesh: DeviceMesh, placements: tuple[Placement, ...] | None) -> _Home:
        text = "" if placements is None else str(placements)
        ranks = tuple(mesh.mesh.flatten().tolist())
        position = mesh.get_coordinate()
        coordinate = None if position is None else tuple(position)
        for placement in placements or ():
            if isinstance(placement, Partial):
                problem = f"holds {placement!r}, values still to be reduced; redistribute it first"
                return _Home(text, ranks, coordinate, problem=problem)
        if self._scope_ranks is not None and not self._scope_ranks.issuperset(ranks):
            problem = "lives on a mesh that reaches beyond the mesh passed; pass one that holds all ranks of the module"
            return _Home(text, ranks, coordinate, problem=problem)
        if coordinate is None:
            return _Home(text, ranks, None)
        groups = {}
        for axis in range(mesh.ndim):
            line = tuple(ranks_along(mesh, axis))
            if len(line) == 1 or (placements is not None and not isinstance(placements[axis], Replicate)):
                continue
            if not 0 <= self._src < len(line):
                problem = f"is replicated {len(line)} times along mesh axis {axis}, src is {self._src}"
                return _Home(text, ranks, coordinate, problem=problem)
            group = mesh.get_group(axis)
            groups[axis] = (line, group, dist.get_group_rank(group, line[self._src]))
        fixed = tuple(None if axis in groups else place for axis, place in enumerate(coordinate))
        # One object for equal ones of several meshes: comparing them again for each tensor takes long on many ranks.
        replica_set = self._replica_sets.setdefault((ranks, fixed), (ranks, fixed))
        return _Home(text, ranks, coordinate, replica_set, tuple(groups.values()))


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


def _refusal(tensor: NamedTensor, scope: DeviceMesh | None, home: _Home | None) -> str | None:
    if scope is None and not isinstance(tensor.value, DTensor):
        if tensor.kind != "buffer":
            return (
                f"is a plain {'parameter' if tensor.kind == 'param' else 'tensor'}: it may be a replica or this rank's "
                "own (a local expert, hand-made tensor parallelism); pass mesh= if its ranks must hold the same, or "
                "ignore it"
            )
        if home is None:
            return "is a plain buffer, and no mesh says between which ranks it is replicated; pass mesh= or ignore it"
    return None if home is None else home.problem


def _unsyncable(local: Tensor) -> str | None:
    if is_traceable_wrapper_subclass(local):
        return next((reason for _, inner in inner_tensors("", local) if (reason := _unsyncable(inner))), None)
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        return f"consists of a {type(local).__name__}, expected tensors"
    if local.is_meta:
        return "is on the meta device; give it memory with to_empty() first"
    if local.is_nested:
        return "is nested; pass the tensor of its values"
    if local.layout is not torch.strided or local.is_quantized:
        what = "quantized" if local.is_quantized else str(local.layout).removeprefix("torch.")
        return f"is {what}; convert it to a dense strided tensor first"
    if local.is_conj() or local.is_neg():
        return "is a lazily conjugated or negated view; resolve it first"
    return None


def listed_fqn(index: int) -> str:
    return f"tensors[{index}]"


def is_plain_list(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors without a class of their own, on one kind of device, with memory."""
    if not set(map(type, tensors)) <= {Tensor, nn.Parameter}:
        return False
    kinds = {device.type for device in set(map(attrgetter("device"), tensors))}
    return len(kinds) == 1 and "meta" not in kinds and not any(map(attrgetter("is_nested"), tensors))


def refusal_in_list(fqn: str, value: Any) -> Problem | None:
    """Why a value cannot be a member of a list of tensors to broadcast, or ``None``."""
    reason: str | None
    try:
        if not isinstance(value, Tensor):
            reason = f"is a {type(value).__name__}, expected a tensor"
        elif isinstance(value, DTensor):
            reason = "is a DTensor; pass its local tensor, or use sync_state_dict"
        else:
            reason = _unsyncable(local_tensor(value))
    except Exception as error:  # a subclass without what is asked of it
        reason = f"cannot be read: {type(error).__name__}: {error}"
    return None if reason is None else Problem("cannot_sync", fqn, reason)


def inner_tensors(fqn: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory that a wrapper subclass (an fp8 weight and its scale) consists of."""
    if not is_traceable_wrapper_subclass(local):
        yield fqn, local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{fqn}.{name}", getattr(local, name))


def _add(found: Replicas, seen: set[Any], tensor: ReplicaTensor, home: _Home) -> None:
    local = tensor.local
    if local.numel() > 0:
        memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), id(home.replica_set))
        if memory in seen:  # tied
            return
        seen.add(memory)
    found.tensors.append(tensor)
    for stage, (ranks, group, src) in enumerate(home.groups):
        found.batches.setdefault((stage, ranks, local.device.type), Batch(group, src)).tensors.append(tensor)
