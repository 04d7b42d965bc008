"""What ranks hold of a tensor, and the decision over what all of them say.

``decide`` reads the reports of all ranks together and settles which elements each rank holds. No rank can do that
alone: the same placements mean FSDP2's nested order or DTensor's left-to-right arithmetic, and one rank's shape may fit
both (``csrc/core/shard_layout.h`` has the definitions and a worked example). Plain values only; no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, ProblemKind
from torchtitan_ext.layout.rules import canonical_fqn

Step = tuple[int, int, int]
"""Mesh axis, tensor dim, split factor."""

Steps = tuple[Step, ...]
"""A sharding order: the steps in which a tensor was cut."""


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
    order: Steps | None = None


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


def candidate_steps(report: ShardReport) -> list[Steps]:
    """The sharding orders that a report leaves open, without repeats; one where the order is stated."""
    if report.mesh is None:
        return [()]
    if report.order is not None:
        return [report.order]
    readings: tuple[Literal["nested", "left_to_right"], ...] = ("nested", "left_to_right")
    candidates: list[Steps] = []
    for reading in readings:
        steps = tuple(_core.read_placements(report.placements, report.mesh.shape, reading))
        if steps not in candidates:
            candidates.append(steps)
    return candidates


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


def narrowed(shard: LocalShard, dim: int, first: int, size: int) -> LocalShard:
    """Elements ``[first, first + size)`` along one dim of the local tensor, as a shard of their own."""
    chunks = []
    for chunk in shard.chunks:
        begin = max(chunk.local_offsets[dim], first)
        end = min(chunk.local_offsets[dim] + chunk.sizes[dim], first + size)
        if begin < end:
            chunks.append(
                Chunk(
                    _with(chunk.offsets, dim, chunk.offsets[dim] + begin - chunk.local_offsets[dim]),
                    _with(chunk.sizes, dim, end - begin),
                    _with(chunk.local_offsets, dim, begin - first),
                )
            )
    return LocalShard(_with(shard.sizes, dim, size), tuple(chunks))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def decide(fqn: str, reports: Sequence[ShardReport]) -> Steps | Problem:
    """Which of the ``candidate_steps`` is true, by what the local tensors of all reporting ranks are.

    Args:
        fqn: The tensor's key.
        reports: Reports that agree in global shape, mesh, placements and stated order, one per coordinate or more.

    Returns:
        The true steps, or the problem: no candidate fits, or two fit and differ.
    """
    first = reports[0]
    if first.mesh is None:
        return ()
    candidates = candidate_steps(first)
    observations = [(report.coordinate, report.local_sizes) for report in reports]
    try:
        outcome, index, other, coordinate = _core.resolve_steps(
            first.global_shape, first.mesh.shape, candidates, observations
        )
    except (ValueError, OverflowError) as error:
        return Problem("layout_matches_nothing", fqn, f"{describe_report(first)}: {error}")
    if outcome == "decided":
        return candidates[index]
    held = () if outcome == "in_doubt" else next(sizes for where, sizes in observations if where == coordinate)
    return unresolved(fqn, first, outcome, index, other, coordinate, held)


def unresolved(
    fqn: str,
    report: ShardReport,
    outcome: Literal["no_match", "in_doubt"],
    index: int,
    other: int,
    coordinate: Sequence[int],
    held: Sequence[int],
) -> Problem:
    """Why no reading could be decided on.

    Args:
        report: Of any rank of the mesh.
        outcome: Whether no candidate fits, or two fit and differ.
        index: One of the candidates that fit.
        other: The other one.
        coordinate: Where no candidate fits, or two differ.
        held: Shape of the local tensor there.
    """
    assert report.mesh is not None
    rank = _rank_at(report.mesh, coordinate)
    candidates = candidate_steps(report)
    if outcome == "in_doubt":
        kind: ProblemKind = "layout_in_doubt"
        both = " or ".join(
            f"{_format_held(report, steps, coordinate)} when sharded {_format_steps(report, steps)}"
            for steps in (candidates[index], candidates[other])
        )
        detail = (
            f"{describe_report(report)} can be read in two ways that fit all local shapes: rank {rank} holds {both}; "
            f"state the order with layouts={{{canonical_fqn(fqn, strip_module=True)!r}: ShardOrder(...)}}"
        )
    else:
        kind = "layout_matches_nothing"
        readings = "; ".join(
            f"sharded {_format_steps(report, steps)} it would hold "
            f"{local_shard(report.global_shape, report.mesh.shape, steps, coordinate).sizes}"
            for steps in candidates
        )
        detail = (
            f"{describe_report(report)}: rank {rank} holds a local tensor of shape {tuple(held)}; {readings}; "
            "the local tensors were not made by these placements"
        )
    return Problem(kind, fqn, detail)


def describe_report(report: ShardReport) -> str:
    """Shape, placements and mesh, in DTensor's words."""
    return f"{tuple(report.global_shape)} as {format_placements(report.placements)} on mesh {report.mesh}"


def is_replicated(report: ShardReport) -> bool:
    """Whether another rank may hold the same elements: a plain tensor, or a mesh axis of 2 or more replicates."""
    if report.mesh is None:
        return True
    return any(dim < 0 and size > 1 for (dim, _), size in zip(report.placements, report.mesh.shape, strict=True))


def is_on_part(report: ShardReport, world_size: int) -> bool:
    """Whether a tensor lies on a mesh that is smaller than the world: another mesh may hold it too."""
    return report.mesh is not None and len(report.mesh.ranks) < world_size


def row_major_position(index: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements of an array of this shape come before the one at ``index``, in row-major order."""
    position = 0
    for at, size in zip(index, shape, strict=True):
        position = position * size + at
    return position


def _rank_at(mesh: MeshLayout, coordinate: Sequence[int]) -> int:
    return mesh.ranks[row_major_position(coordinate, mesh.shape)]


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
