"""What a rank says of its tensors, and the decision over what all ranks say.

The only module that reads private DTensor attributes. ``describe`` turns a tensor into plain values (``ShardReport``);
``decide`` reads the reports of all ranks together and settles which elements each rank holds. No rank can do that
alone: the same placements mean FSDP2's nested order or DTensor's left-to-right arithmetic, and one rank's shape may fit
both (``csrc/core/shard_layout.h`` has the definitions and a worked example).
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, ProblemKind

Step = tuple[int, int, int]
"""Mesh axis, tensor dim, split factor."""


class Chunk(NamedTuple):
    """A box of a global tensor that a rank holds.

    Attributes:
        offsets: Where it begins in the global tensor, in elements.
        sizes: Its shape; never 0 in any dim.
        local_offsets: Where it begins in the rank's local tensor, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


class LocalShard(NamedTuple):
    """What one rank holds of one tensor: the local tensor's shape and the chunks that tile it, in row-major order."""

    sizes: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ShardOrder:
    """States the order in which mesh axes were sharded, where placements cannot say it.

    Interleaved fused QKV under tensor parallelism, then FSDP2, is ``ShardOrder((("tp", 0, 3), ("dp", 0, 1)))``: first
    axis ``tp`` takes its part of each of 3 blocks of dim 0, then ``dp`` chunks what is left.

    Attributes:
        steps: (mesh axis by name or index, tensor dim, split factor), in the order of sharding. Split factor 1 is
            ``torch.chunk``.
    """

    steps: tuple[tuple[int | str, int, int], ...]


@dataclass(frozen=True)
class MeshLayout:
    """A device mesh as plain values; ``ranks`` are global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.dim_names is None:
            return "x".join(map(str, self.shape))
        return " x ".join(f"{name} {size}" for name, size in zip(self.dim_names, self.shape, strict=True))


@dataclass(frozen=True)
class ShardReport:
    """What one rank says of one tensor.

    Attributes:
        global_shape: Shape of the global tensor.
        mesh: The mesh, or ``None`` for a plain tensor.
        coordinate: This rank's coordinate on the mesh.
        placements: Per mesh axis (tensor dim or -1 for replicated, split factor).
        local_sizes: Shape of the local tensor.
        order: The sharding order, where the user or DTensor itself states one.
    """

    global_shape: tuple[int, ...]
    mesh: MeshLayout | None = None
    coordinate: tuple[int, ...] = ()
    placements: tuple[tuple[int, int], ...] = ()
    local_sizes: tuple[int, ...] = ()
    order: tuple[Step, ...] | None = None


class LayoutRules:
    """The ``layouts`` argument of planners: sharding orders by canonical fqn or glob.

    A rule for ``wqkv.weight`` applies to the parameter under any prefix (``model.layers.0.wqkv.weight``) and to its
    flattened optimizer state (``optimizer.state.layers.0.wqkv.weight.exp_avg``). A rule without wildcards comes before
    a glob.
    """

    def __init__(self, layouts: Mapping[str, ShardOrder] | None = None) -> None:
        self._layouts = dict(layouts or {})
        for pattern, order in self._layouts.items():
            if not isinstance(order, ShardOrder):
                raise ValueError(f"layouts: got {type(order).__name__} for {pattern!r}, expected a ShardOrder")

    def find(self, fqn: str) -> ShardOrder | None:
        """The order stated for a key, or ``None``. Raises ValueError where two rules of one rank differ."""
        if not self._layouts:
            return None
        matching = [pattern for pattern in self._layouts if _rule_applies(pattern, fqn)]
        exact = [pattern for pattern in matching if not any(char in pattern for char in "*?[")]
        chosen = exact or matching
        if len({self._layouts[pattern] for pattern in chosen}) > 1:
            raise ValueError(f"layouts: the rules {chosen} say different things of {fqn}; make one of them narrower")
        return self._layouts[chosen[0]] if chosen else None


def canonical_fqn(fqn: str, *, strip_module: bool = False) -> str:
    """The key without the components that torch.compile, activation checkpointing and FSDP1 add.

    Args:
        fqn: A key of a state dict.
        strip_module: Also without ``module`` (DDP), which may be a module's own name too.
    """
    dropped = _WRAPPER_COMPONENTS | {"module"} if strip_module else _WRAPPER_COMPONENTS
    parts = fqn.split(".")
    return fqn if dropped.isdisjoint(parts) else ".".join(part for part in parts if part not in dropped)


_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _rule_applies(pattern: str, fqn: str) -> bool:
    names = [fqn, canonical_fqn(fqn, strip_module=True)]
    names += [match.group(1) for name in tuple(names) if (match := _OPTIMIZER_STATE.search(name))]
    return any(fnmatch.fnmatchcase(name, form) for name in names for form in (pattern, f"*.{pattern}"))


# state.<parameter fqn>.<exp_avg>, as get_optimizer_state_dict flattens it.
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(.+)\.[^.]+$")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own memory of a tensor: a DTensor's local tensor, any other tensor itself.

    Detached and as a plain ``torch.Tensor`` (tensor subclasses with storage of their own are seen through), never a
    copy; what an asynchronous collective still writes is waited for.
    """
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = (held.wait() if isinstance(held, AsyncCollectiveTensor) else held).detach()
    if type(local) is torch.Tensor or is_traceable_wrapper_subclass(local):
        return local
    with torch._C.DisableTorchFunctionSubclass():
        return local.as_subclass(torch.Tensor)


def local_view(local: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The box of a local tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(dim, offset, size)
    return local


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of the same layout on ``device`` (of a DTensor: its local tensor). Not collective."""
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor._local_tensor, device=device)
        return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
    return torch.empty_like(tensor, device=device)


def cpu_copy(tensor: torch.Tensor, known: dict[Any, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A copy in CPU memory of its own: contiguous, with conjugation and negation carried out. Not collective.

    Args:
        tensor: Of a DTensor the local tensor is copied, and of a subclass that consists of tensors each of these.
        known: Originals and copies so far, by their memory: equal views of one memory share a copy. Holding the
            originals keeps their memory from being another tensor's meanwhile.
    """
    if isinstance(tensor, DTensor):
        return DTensor(cpu_copy(tensor._local_tensor, known), tensor._spec, requires_grad=tensor.requires_grad)
    if isinstance(tensor, AsyncCollectiveTensor):
        return cpu_copy(tensor.wait(), known)
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided or describes_itself(tensor):
        return copy.deepcopy(tensor.detach())
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: cpu_copy(getattr(tensor, name), known) for name in names}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    local = local_tensor(tensor)
    memory = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg())
    if memory not in known or local.numel() == 0:
        known[memory] = (local, torch.empty(local.shape, dtype=local.dtype, device="cpu").copy_(local))
    return known[memory][1].detach().requires_grad_(tensor.requires_grad)


def is_on_mesh(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part: false only for a DTensor whose mesh this rank is not on."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def describes_itself(value: Any) -> bool:
    """Whether DCP's hooks, on the value or on a DTensor's local tensor, say which boxes a rank holds."""
    if isinstance(value, ShardedTensor):
        return True
    holder = value._local_tensor if isinstance(value, DTensor) else value
    return hasattr(holder, "__create_chunk_list__")


class Describer:
    """Turns tensors into reports, making the plain form of each mesh once.

    Args:
        rules: Sharding orders that placements cannot express.
    """

    def __init__(self, rules: LayoutRules) -> None:
        self._rules = rules
        self._meshes: dict[int, tuple[DeviceMesh, MeshLayout]] = {}

    def describe(self, fqn: str, tensor: torch.Tensor) -> ShardReport | Problem:
        """The report on a tensor of which this rank holds a part (``is_on_mesh``), or why there can be none."""
        if not isinstance(tensor, DTensor):
            return ShardReport(global_shape=tuple(tensor.shape), local_sizes=tuple(tensor.shape))
        report = self.describe_placements(fqn, tensor.shape, tensor.device_mesh, tensor.placements)
        if isinstance(report, Problem):
            return report
        order = _order_in_spec(tensor, report.placements) if report.order is None else report.order
        return replace(report, local_sizes=tuple(tensor._local_tensor.shape), order=order)

    def describe_placements(
        self, fqn: str, global_shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> ShardReport | Problem:
        """The report on a tensor that is still to be made: everything but the local sizes."""
        mesh = self._mesh_layout(device_mesh)
        described: list[tuple[int, int]] = []
        for axis, placement in enumerate(placements):
            entry = _describe_placement(fqn, placement, axis, mesh, len(global_shape))
            if isinstance(entry, Problem):
                return entry
            described.append(entry)
        order = self._stated_order(fqn, mesh, described, len(global_shape))
        if isinstance(order, Problem):
            return order
        return ShardReport(
            global_shape=tuple(global_shape),
            mesh=mesh,
            coordinate=tuple(device_mesh.get_coordinate() or ()),
            placements=tuple(described),
            order=order,
        )

    def _mesh_layout(self, mesh: DeviceMesh) -> MeshLayout:
        if id(mesh) not in self._meshes:
            names = mesh.mesh_dim_names
            layout = MeshLayout(
                shape=tuple(mesh.shape),
                ranks=tuple(mesh.mesh.flatten().tolist()),
                dim_names=None if names is None else tuple(names),
            )
            known = next((other for _, other in self._meshes.values() if other == layout), layout)
            self._meshes[id(mesh)] = (mesh, known)
        return self._meshes[id(mesh)][1]

    def _stated_order(
        self, fqn: str, mesh: MeshLayout, placements: Sequence[tuple[int, int]], num_dims: int
    ) -> tuple[Step, ...] | None | Problem:
        sharding = {axis: dim for axis, (dim, _) in enumerate(placements) if dim >= 0}
        stated = self._rules.find(fqn)
        if stated is None or not sharding:
            return None
        steps: list[Step] = []
        for axis, dim, split_factor in stated.steps:
            if isinstance(axis, str):
                if mesh.dim_names is None or axis not in mesh.dim_names:
                    return Problem(
                        "layout_matches_nothing",
                        fqn,
                        f"the stated order names mesh axis {axis!r}, the mesh has {mesh}; name one of its axes",
                    )
                axis = mesh.dim_names.index(axis)
            steps.append((axis, dim + num_dims if dim < 0 else dim, split_factor))
        if {axis: dim for axis, dim, _ in steps} != sharding or len(steps) != len(sharding):
            return Problem(
                "layout_matches_nothing",
                fqn,
                f"the stated order {tuple(steps)} does not shard the axes and dims that its placements "
                f"{format_placements(placements)} shard; give one step per sharding axis",
            )
        return tuple(steps)


def _describe_placement(
    fqn: str, placement: Placement, axis: int, mesh: MeshLayout, num_dims: int
) -> tuple[int, int] | Problem:
    if isinstance(placement, Replicate):
        return (-1, 1)
    # _StridedShard was a subclass of Shard before torch 2.10.
    if isinstance(placement, _StridedShard):
        dim, split_factor = placement.dim, int(placement.split_factor)
    elif isinstance(placement, Shard):
        dim, split_factor = placement.dim, 1
    else:
        where = f"mesh axis {axis if mesh.dim_names is None else mesh.dim_names[axis]!r}"
        if isinstance(placement, Partial):
            return Problem(
                "partial_placement",
                fqn,
                f"{where} holds Partial({placement.reduce_op!r}), values still to be reduced; "
                "redistribute it to Replicate() or Shard() first",
            )
        return Problem("unknown_placement", fqn, f"{where} has {placement!r}; redistribute it to Shard or Replicate")
    return (dim + num_dims if dim < 0 else dim, split_factor)


def _order_in_spec(tensor: DTensor, placements: Sequence[tuple[int, int]]) -> tuple[Step, ...] | None:
    """The order that DTensor itself records (``DTensorSpec.shard_order``), where it is not left to right."""
    shard_order = getattr(tensor._spec, "shard_order", None)
    if not shard_order or any(split_factor != 1 for _, split_factor in placements):
        return None
    steps = tuple((axis, entry.tensor_dim, 1) for entry in shard_order for axis in entry.mesh_dims)
    left_to_right = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in shard_order)
    return None if left_to_right else steps


def format_placements(placements: Sequence[tuple[int, int]]) -> str:
    """Placements in DTensor's words."""
    words = []
    for dim, split_factor in placements:
        if dim < 0:
            words.append("Replicate()")
        elif split_factor == 1:
            words.append(f"Shard({dim})")
        else:
            words.append(f"_StridedShard({dim}, split_factor={split_factor})")
    return f"[{', '.join(words)}]"


def candidate_steps(report: ShardReport) -> list[list[Step]]:
    """The sharding orders that a report leaves open, without repeats; one where the order is stated."""
    if report.mesh is None:
        return [[]]
    if report.order is not None:
        return [list(report.order)]
    readings: tuple[Literal["nested", "left_to_right"], ...] = ("nested", "left_to_right")
    candidates: list[list[Step]] = []
    for reading in readings:
        steps = _core.read_placements(report.placements, report.mesh.shape, reading)
        if steps not in candidates:
            candidates.append(steps)
    return candidates


def shard_of(report: ShardReport, choice: int = 0) -> LocalShard:
    """What a rank holds under one of its ``candidate_steps``."""
    mesh_shape = () if report.mesh is None else report.mesh.shape
    return local_shard(report.global_shape, mesh_shape, candidate_steps(report)[choice], report.coordinate)


def local_shard(
    global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[Step], coordinate: Sequence[int]
) -> LocalShard:
    """What the rank at ``coordinate`` holds, from plain values alone."""
    sizes, chunks = _core.shard_at(global_shape, mesh_shape, steps, coordinate)
    return LocalShard(sizes, tuple(Chunk(*chunk) for chunk in chunks))


def decide(fqn: str, reports: Sequence[ShardReport]) -> int | Problem:
    """Which of the ``candidate_steps`` is true, by what the local tensors of all reporting ranks are.

    Args:
        fqn: The tensor's key.
        reports: Reports that agree in global shape, mesh, placements and stated order, one per coordinate or more.

    Returns:
        The index into ``candidate_steps``, or the problem: no candidate fits, or two fit and differ.
    """
    first = reports[0]
    if first.mesh is None:
        return 0
    candidates = candidate_steps(first)
    observations = [(report.coordinate, report.local_sizes) for report in reports]
    try:
        outcome, index, other, coordinate = _core.resolve_steps(
            first.global_shape, first.mesh.shape, candidates, observations
        )
    except (ValueError, OverflowError) as error:
        return Problem("layout_matches_nothing", fqn, f"{_where(first)}: {error}")
    if outcome == "decided":
        return index
    rank = _rank_at(first.mesh, coordinate)
    if outcome == "in_doubt":
        kind: ProblemKind = "layout_in_doubt"
        both = " or ".join(
            f"{_format_held(first, steps, coordinate)} when sharded {_format_steps(first, steps)}"
            for steps in (candidates[index], candidates[other])
        )
        detail = (
            f"{_where(first)} can be read in two ways that fit all local shapes: rank {rank} holds {both}; "
            f"state the order with layouts={{{canonical_fqn(fqn, strip_module=True)!r}: ShardOrder(...)}}"
        )
    else:
        kind = "layout_matches_nothing"
        held = next(sizes for where, sizes in observations if where == coordinate)
        readings = "; ".join(
            f"sharded {_format_steps(first, steps)} it would hold "
            f"{local_shard(first.global_shape, first.mesh.shape, steps, coordinate).sizes}"
            for steps in candidates
        )
        detail = (
            f"{_where(first)}: rank {rank} holds a local tensor of shape {tuple(held)}; {readings}; "
            "the local tensors were not made by these placements"
        )
    return Problem(kind, fqn, detail)


def replica_key(report: ShardReport) -> tuple[int, ...]:
    """The coordinate with 0 on every axis that replicates: equal for ranks that hold equal shards."""
    return tuple(index if dim >= 0 else 0 for index, (dim, _) in zip(report.coordinate, report.placements, strict=True))


def is_replicated(report: ShardReport) -> bool:
    """Whether another rank may hold the same elements: a plain tensor, or a mesh axis of 2 or more replicates."""
    if report.mesh is None:
        return True
    return any(dim < 0 and size > 1 for (dim, _), size in zip(report.placements, report.mesh.shape, strict=True))


def missing_ranks(reports: Sequence[ShardReport]) -> list[int]:
    """Global ranks of the mesh of these reports that did not report."""
    mesh = reports[0].mesh
    if mesh is None:
        return []
    seen = {_rank_at(mesh, report.coordinate) for report in reports}
    return [rank for rank in mesh.ranks if rank not in seen]


def _rank_at(mesh: MeshLayout, coordinate: Sequence[int]) -> int:
    index = 0
    for size, position in zip(mesh.shape, coordinate, strict=True):
        index = index * size + position
    return mesh.ranks[index]


def _where(report: ShardReport) -> str:
    return f"{tuple(report.global_shape)} as {format_placements(report.placements)} on mesh {report.mesh}"


def _format_steps(report: ShardReport, steps: Sequence[Step]) -> str:
    assert report.mesh is not None
    words = []
    for axis, dim, split_factor in steps:
        name = str(axis) if report.mesh.dim_names is None else report.mesh.dim_names[axis]
        words.append(f"{name} on dim {dim}" + (f" in {split_factor} blocks" if split_factor > 1 else ""))
    return f"({', then '.join(words)})"


def _format_held(report: ShardReport, steps: Sequence[Step], coordinate: Sequence[int]) -> str:
    assert report.mesh is not None
    chunks = local_shard(report.global_shape, report.mesh.shape, steps, coordinate).chunks
    boxes = [
        "x".join(f"{begin}:{begin + size}" for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in chunks
    ]
    return "no element" if not boxes else ", ".join(boxes[:4]) + (", ..." if len(boxes) > 4 else "")


def mesh_coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """All coordinates of a mesh, in row-major order."""
    return list(itertools.product(*map(range, mesh_shape)))


def num_elements(sizes: Sequence[int]) -> int:
    """Product of sizes; 1 for a 0-d tensor."""
    return math.prod(sizes)
