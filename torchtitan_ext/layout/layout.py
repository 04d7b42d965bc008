"""Which elements of a tensor each rank holds: reports of ranks, the decision over them, orders that a user states.

``decide`` reads the reports of all ranks together and settles which elements each rank holds. No rank can do that
alone: the same placements mean FSDP2's nested order or DTensor's left-to-right arithmetic, and one rank's shape may fit
both (``csrc/core/shard_layout.h`` has the definitions and a worked example). ``ShardOrder`` states an order that
placements cannot express, for keys or globs of keys. Plain values only; no torch.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, argument_error, check_argument
from torchtitan_ext.errors.near_names import nearest_name

Step = tuple[int, int, int]
"""Mesh axis, tensor dim, split factor."""

Steps = tuple[Step, ...]
"""A sharding order: the steps in which a tensor was cut."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a tensor, in elements."""


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


def shard_of_box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> LocalShard:
    """A local tensor that is one box of its global tensor."""
    return LocalShard(sizes, (Chunk(offsets, sizes, (0,) * len(sizes)),))


@dataclass(frozen=True)
class MeshLayout:
    """A device mesh as plain values; ``ranks`` are global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None

    def __str__(self) -> str:
        return _core.format_mesh(self.shape, self.dim_names)


@dataclass(frozen=True)
class ShardReport:
    """The report of one rank on one tensor.

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
    order: Steps | None = None


def candidate_steps(report: ShardReport) -> list[Steps]:
    """The sharding orders that a report leaves open, without repeats; one where the order is stated."""
    mesh_shape = () if report.mesh is None else report.mesh.shape
    return _core.candidate_steps(report.placements, mesh_shape, report.order)


def shard_of(report: ShardReport, steps: Steps | None = None) -> LocalShard:
    """What a rank holds when sharded by these steps; by the first of its ``candidate_steps`` if left out."""
    mesh_shape = () if report.mesh is None else report.mesh.shape
    steps = candidate_steps(report)[0] if steps is None else steps
    return local_shard(report.global_shape, mesh_shape, steps, report.coordinate)


def local_shard(
    global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[Step], coordinate: Sequence[int]
) -> LocalShard:
    """What the rank at ``coordinate`` holds, from plain values alone."""
    return _made_of(*_core.shard_at(global_shape, mesh_shape, steps, coordinate))


def local_shards(global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[Step]) -> list[LocalShard]:
    """What the ranks at all coordinates hold, in row-major order of the mesh."""
    return [_made_of(*shard) for shard in _core.all_shards(global_shape, mesh_shape, steps)]


def _made_of(sizes: tuple[int, ...], chunks: Sequence[Sequence[tuple[int, ...]]]) -> LocalShard:
    return LocalShard(sizes, tuple(Chunk(*chunk) for chunk in chunks))


def part_of_shard(shard: LocalShard, offsets: Sequence[int], sizes: tuple[int, ...]) -> LocalShard:
    """A box of the local tensor, as a shard of its own."""
    chunks = []
    for part in _core.find_overlaps([(offsets, sizes, ())], [(of.local_offsets, of.sizes) for of in shard.chunks]):
        begin = tuple(map(add, shard.chunks[part.saved].offsets, part.saved_offsets))
        chunks.append(Chunk(begin, part.sizes, part.local_offsets))
    return LocalShard(sizes, tuple(chunks))


def decide(fqn: str, reports: Sequence[ShardReport]) -> Steps | Problem:
    """Which of the ``candidate_steps`` is true, by what the local tensors of all reporting ranks are.

    Args:
        fqn: The tensor's key.
        reports: Reports that agree in global shape, mesh, placements and stated order, one per coordinate or more.

    Returns:
        The true steps, or the problem: no candidate fits, or two fit and differ.
    """
    decided = _core.decide_steps(list(reports))
    return key_problem(fqn, decided) if isinstance(decided, _core.KeyProblem) else decided


def key_problem(fqn: str, found: _core.KeyProblem) -> Problem:
    """What C++ finds wrong with a key, as a problem."""
    rule = canonical_fqn(fqn, strip_module=True)
    how = f"; state the order with layouts={{{rule!r}: ShardOrder(...)}}" if found.kind == "layout_in_doubt" else ""
    return Problem(found.kind, fqn, found.detail + how)


def is_replicated(report: ShardReport) -> bool:
    """Whether another rank may hold the same elements: a plain tensor, or a mesh axis of 2 or more replicates."""
    if report.mesh is None:
        return True
    return any(dim < 0 and size > 1 for (dim, _), size in zip(report.placements, report.mesh.shape, strict=True))


def is_on_part(report: ShardReport, world_size: int) -> bool:
    """Whether a tensor lies on a mesh that is smaller than the world: another mesh may hold it too."""
    return report.mesh is not None and len(report.mesh.ranks) < world_size


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of an array of this shape without gaps."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def aligned(num_bytes: int, alignment: int = 64) -> int:
    """Where the next tensor of a flat buffer begins: behind so many bytes, by default as in ``ops.flat_offsets``."""
    return -(-num_bytes // alignment) * alignment


def row_major_position(index: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements of an array of this shape come before the one at ``index``, in row-major order."""
    position = 0
    for at, size in zip(index, shape, strict=True):
        position = position * size + at
    return position


def mesh_coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """All coordinates of a mesh, in row-major order."""
    return list(itertools.product(*map(range, mesh_shape)))


def num_elements(sizes: Sequence[int]) -> int:
    """Product of sizes; 1 for a 0-d tensor."""
    return math.prod(sizes)


@dataclass(frozen=True)
class ShardOrder:
    """States the order in which mesh axes were sharded, where placements cannot say it.

    Interleaved fused QKV under tensor parallelism, then FSDP2, is ``ShardOrder((("tp", 0, 3), ("dp", 0, 1)))``: first
    axis ``tp`` takes its part of each of 3 blocks of dim 0, then ``dp`` chunks what is left.

    Attributes:
        steps: (mesh axis by name or index, tensor dim, split factor), in the order of sharding. Split factor 1 is
            ``torch.chunk``.

    Raises:
        TypeError: ``steps`` is not a sequence of such triples.
        ValueError: A split factor below 1.
    """

    steps: tuple[tuple[int | str, int, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, (tuple, list)) or not all(map(_is_step, self.steps)):
            expected = "steps (mesh axis, tensor dim, split factor), such as (('tp', 0, 3), ('dp', 0, 1))"
            raise argument_error("ShardOrder", "steps", self.steps, expected)
        for axis, _, split_factor in self.steps:
            if split_factor < 1:
                raise ValueError(f"ShardOrder: got split factor {split_factor} for axis {axis!r}, expected at least 1")
        # Lists have no hash, by which orders are compared.
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))


class LayoutRules:
    """The ``layouts`` argument of planners: sharding orders by canonical fqn or glob.

    A rule for ``wqkv.weight`` applies to the parameter under any prefix (``model.layers.0.wqkv.weight``) and to its
    flattened optimizer state (``optimizer.state.layers.0.wqkv.weight.exp_avg``). A rule without wildcards comes before
    a glob.
    """

    def __init__(self, layouts: Mapping[str, ShardOrder] | None = None) -> None:
        expected = "a mapping such as {'*.wqkv.weight': ShardOrder(...)}"
        check_argument("planner", "layouts", layouts, (Mapping, type(None)), expected)
        self._layouts = dict(layouts or {})
        for pattern, order in self._layouts.items():
            if not isinstance(order, ShardOrder):
                raise TypeError(f"layouts: got {type(order).__name__} for {pattern!r}, expected a ShardOrder")

    def matches(self, fqns: Collection[str]) -> dict[str, bool]:
        """Whether each pattern applies to one of these keys."""
        return {pattern: any(rule_applies(pattern, fqn) for fqn in fqns) for pattern in self._layouts}

    def __bool__(self) -> bool:
        """Whether there are any rules."""
        return bool(self._layouts)

    def find(self, fqn: str) -> ShardOrder | None:
        """The order stated for a key, or ``None``. Raises ValueError where two rules of one rank differ."""
        if not self._layouts:
            return None
        chosen = patterns_for(fqn, self._layouts)
        if len({self._layouts[pattern] for pattern in chosen}) > 1:
            raise ValueError(f"layouts: the rules {chosen} say different things of {fqn}; make one of them narrower")
        return self._layouts[chosen[0]] if chosen else None


def patterns_for(fqn: str, patterns: Iterable[str]) -> list[str]:
    """The patterns that apply to a key: the names among them, or else the globs; see ``LayoutRules``."""
    matching = [pattern for pattern in patterns if rule_applies(pattern, fqn)]
    exact = [pattern for pattern in matching if not any(char in pattern for char in "*?[")]
    return exact or matching


def unused_problem(pattern: str, fqns: Collection[str]) -> Problem:
    """The problem with a pattern that applies to no key on any rank; ``fqns`` are all keys."""
    ends = {".".join(fqn.split(".")[-1 - pattern.count(".") :]): fqn for fqn in fqns}
    close = nearest_name(pattern, ends)
    hint = f"did you mean {close!r} (as in {ends[close]})?" if close else "keys are such as " + next(iter(fqns), "")
    return Problem("unused_layout", pattern, f"matches no key on any rank; {hint}")


def canonical_fqn(fqn: str, *, strip_module: bool = False) -> str:
    """The key without the components that torch.compile, activation checkpointing and FSDP1 add.

    Args:
        fqn: A key of a state dict.
        strip_module: Drop ``module`` (DDP) too, which may also be the name of a module.
    """
    dropped = _WRAPPER_COMPONENTS | {"module"} if strip_module else _WRAPPER_COMPONENTS
    parts = fqn.split(".")
    return fqn if dropped.isdisjoint(parts) else ".".join(part for part in parts if part not in dropped)


_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _is_step(step: object) -> bool:
    if not isinstance(step, (tuple, list)) or len(step) != 3:
        return False
    axis, dim, split_factor = step
    return isinstance(axis, (int, str)) and isinstance(dim, int) and isinstance(split_factor, int)


def rule_applies(pattern: str, fqn: str) -> bool:
    """Whether a rule for a parameter, a name or glob, applies to this key; see ``LayoutRules``."""
    names = [fqn, canonical_fqn(fqn, strip_module=True)]
    names += [match.group(1) for name in tuple(names) if (match := _OPTIMIZER_STATE.search(name))]
    return any(fnmatch.fnmatchcase(name, form) for name in names for form in (pattern, f"*.{pattern}"))


# state.<parameter fqn>.<exp_avg>, as get_optimizer_state_dict flattens it.
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(.+)\.[^.]+$")
