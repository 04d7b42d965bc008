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
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.errors import Problem
from torchtitan_ext.exchange import ranks_along
from torchtitan_ext.layout import canonical_fqn, local_tensor
from torchtitan_ext.state_dict import flatten_state_dict

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
        if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
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
        flat = flatten_state_dict(source).values
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
    is_ddp = isinstance(module, DistributedDataParallel)
    if params:
        for fqn, param in module.named_parameters():
            yield NamedTensor(canonical_fqn(fqn, strip_module=is_ddp), param, "param")
    if buffers == "none":
        return
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }
    for fqn, buffer in module.named_buffers():
        if buffers == "all" or fqn not in transient:
            yield NamedTensor(canonical_fqn(fqn, strip_module=is_ddp), buffer, "buffer")


def find_replicas(tensors: Sequence[NamedTensor], mesh: DeviceMesh | None, src: int) -> Replicas:
    """Works out the batches of this rank.

    Args:
        tensors: In the same order on all ranks that share a replica.
        mesh: Where plain tensors are replicated. Without it plain buffers belong to the mesh of the DTensors that holds
            all others' ranks, and plain parameters and entries of state dicts are refused.
        src: Coordinate of the source on every axis that replicates.
    """
    found = Replicas()
    views = _MeshViews()
    whole = mesh if mesh is not None else _widest_mesh(tensors)
    scope = None if mesh is None else views.of(mesh)
    seen: set[Any] = set()
    for tensor in tensors:
        home_mesh = tensor.value.device_mesh if isinstance(tensor.value, DTensor) else whole
        home = None if home_mesh is None else views.of(home_mesh)
        if isinstance(tensor.value, DTensor) and home is not None and home.coordinate is None:
            continue
        problem = _refusal(tensor, scope, home, src)
        if problem is not None:
            found.problems.append(problem)
            continue
        assert home is not None, "a tensor without a mesh was not refused, please report"
        axes = _replicating_axes(tensor.value, home)
        num_known = len(found.tensors)
        for fqn, local in inner_tensors(tensor.fqn, local_tensor(tensor.value)):
            _add(found, seen, ReplicaTensor(fqn, local, *_place(tensor.value, home, axes)), home, axes, src)
        if len(found.tensors) > num_known:
            found.owners.append(tensor.value)
    return found


@dataclass(frozen=True)
class _MeshView:
    """A mesh in plain values: asking it for each of thousands of tensors takes longer than to send these.

    Attributes:
        coordinate: Of this rank; ``None`` where it is not on the mesh.
        lines: Per axis the global ranks on the line through this rank, by coordinate.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    lines: tuple[tuple[int, ...], ...]


class _MeshViews:
    """The view of each mesh, made once."""

    def __init__(self) -> None:
        self._by_identity: dict[int, _MeshView] = {}

    def of(self, mesh: DeviceMesh) -> _MeshView:
        if id(mesh) not in self._by_identity:
            coordinate = mesh.get_coordinate()
            lines = () if coordinate is None else tuple(tuple(ranks_along(mesh, axis)) for axis in range(mesh.ndim))
            self._by_identity[id(mesh)] = _MeshView(
                mesh, tuple(mesh.mesh.flatten().tolist()), None if coordinate is None else tuple(coordinate), lines
            )
        return self._by_identity[id(mesh)]


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


def _replicating_axes(value: Tensor, home: _MeshView) -> list[int]:
    """Mesh axes of two and more ranks along which a tensor is replicated: all of them for a plain one."""
    return [
        axis
        for axis, line in enumerate(home.lines)
        if len(line) > 1 and (not isinstance(value, DTensor) or isinstance(value.placements[axis], Replicate))
    ]


def _refusal(tensor: NamedTensor, scope: _MeshView | None, home: _MeshView | None, src: int) -> Problem | None:
    value = tensor.value
    reason = None
    if isinstance(value, DTensor):
        assert home is not None
        partial = [placement for placement in value.placements if isinstance(placement, Partial)]
        if partial:
            reason = f"holds {partial[0]!r}, values still to be reduced; redistribute it first"
        elif scope is not None and scope is not home and not set(scope.ranks).issuperset(home.ranks):
            reason = "lives on a mesh that reaches beyond the mesh passed; pass one that holds all ranks of the module"
    elif scope is None and tensor.kind != "buffer":
        reason = (
            f"is a plain {'parameter' if tensor.kind == 'param' else 'tensor'}: it may be a replica or this rank's own "
            "(a local expert, hand-made tensor parallelism); pass mesh= if its ranks must hold the same, or ignore it"
        )
    elif home is None:
        reason = "is a plain buffer, and no mesh says between which ranks it is replicated; pass mesh= or ignore it"
    if reason is None and home is not None:
        short = [axis for axis in _replicating_axes(value, home) if not 0 <= src < len(home.lines[axis])]
        if short:
            reason = f"is replicated {len(home.lines[short[0]])} times along mesh axis {short[0]}, src is {src}"
    reason = reason or _unsyncable(local_tensor(value))
    return None if reason is None else Problem("cannot_sync", tensor.fqn, reason)


def _unsyncable(local: Tensor) -> str | None:
    if is_traceable_wrapper_subclass(local):
        return next((reason for _, inner in inner_tensors("", local) if (reason := _unsyncable(inner))), None)
    if local.is_meta:
        return "is on the meta device; give it memory with to_empty() first"
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
    return len(kinds) == 1 and "meta" not in kinds


def refusal_in_list(fqn: str, value: Any) -> Problem | None:
    """Why a value cannot be a member of a list of tensors to broadcast, or ``None``."""
    reason: str | None
    if not isinstance(value, Tensor):
        reason = f"is a {type(value).__name__}, expected a tensor"
    elif isinstance(value, DTensor):
        reason = "is a DTensor; pass its local tensor, or use sync_state_dict"
    else:
        reason = _unsyncable(local_tensor(value))
    return None if reason is None else Problem("cannot_sync", fqn, reason)


def inner_tensors(fqn: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory that a wrapper subclass (an fp8 weight and its scale) consists of."""
    if not is_traceable_wrapper_subclass(local):
        yield fqn, local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{fqn}.{name}", getattr(local, name))


def _place(value: Tensor, home: _MeshView, axes: Sequence[int]) -> tuple[str, tuple[Any, ...], tuple[int, ...]]:
    """Layout, replica set and coordinate of a ``ReplicaTensor``."""
    layout = f"global shape {tuple(value.shape)}, {value.placements}" if isinstance(value, DTensor) else ""
    coordinate = home.coordinate or ()
    fixed = tuple(None if axis in axes else position for axis, position in enumerate(coordinate))
    return layout, (home.ranks, fixed), coordinate


def _add(
    found: Replicas, seen: set[Any], tensor: ReplicaTensor, home: _MeshView, axes: Sequence[int], src: int
) -> None:
    local = tensor.local
    memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), home.ranks, tuple(axes))
    if local.numel() > 0 and memory in seen:  # tied
        return
    seen.add(memory)
    found.tensors.append(tensor)
    for stage, axis in enumerate(axes):
        ranks = home.lines[axis]
        key = (stage, ranks, local.device.type)
        if key not in found.batches:
            group = home.mesh.get_group(axis)
            found.batches[key] = Batch(group, dist.get_group_rank(group, ranks[src]))
        found.batches[key].tensors.append(tensor)
