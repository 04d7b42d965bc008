"""What all ranks' key tables say together, key by key and rank by rank: slow, obvious, the oracle of ``agreement``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan_ext import _core
from torchtitan_ext._core import HeldShard, format_placements
from torchtitan_ext.checkpoint.planners.replica_digests import ReplicaComparison
from torchtitan_ext.checkpoint.tables import agreement as ours
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.errors import Problem, named
from torchtitan_ext.layout.layout import (
    Box,
    MeshLayout,
    ShardReport,
    Steps,
    decide,
    mesh_coordinates,
    num_elements,
    shard_of,
)


@dataclass(frozen=True)
class TensorAgreement:
    """What ranks agree on for one tensor.

    Attributes:
        steps: Per reporting rank the order of its shard; empty for tensors that describe themselves.
        replicas: Each entry is one complete tensor, as the shards that make it up.
        is_plain: Whether every rank holds it as a plain tensor.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_plain: bool
    steps: Mapping[int, Steps]
    replicas: tuple[tuple[HeldShard, ...], ...]


@dataclass(frozen=True)
class ObjectAgreement:
    """A key that is no tensor, and the ranks that have it."""

    ranks: tuple[int, ...]


def agreed_keys(agreement: ours.Agreement) -> dict[str, TensorAgreement | ObjectAgreement]:
    """What an agreement says of each key without a problem."""
    return {agreement.names[key]: _agreed(agreement, of_class) for key, of_class in agreement.agreed_keys.items()}


def _agreed(agreement: ours.Agreement, of_class: int) -> TensorAgreement | ObjectAgreement:
    kind, joint = agreement.kinds[of_class], agreement.joint
    dtype = ours.dtype_named(kind.dtype)
    if dtype is None:
        return ObjectAgreement(tuple(joint.ranks(of_class)))
    steps: dict[int, Steps] = {}
    replicas: list[tuple[HeldShard, ...]] = []
    for replica in joint.replicas(of_class):
        if kind.type != _core.EntryType.BOXES:
            steps.update(dict.fromkeys(replica.ranks, replica.steps))
        if kind.is_plain:  # one stands for all
            replicas += [(HeldShard([rank], replica.shards[0].boxes),) for rank in replica.ranks]
        else:
            replicas.append(replica.shards)
    return TensorAgreement(kind.global_shape, dtype, kind.requires_grad, kind.is_plain, steps, tuple(replicas))


@dataclass(frozen=True)
class Agreement:
    """What the tables say together; ``keys`` lacks those with a problem."""

    keys: Mapping[str, TensorAgreement | ObjectAgreement]
    problems: tuple[Problem, ...]


def agree(tables: Sequence[KeyTable], *, needs_all_ranks: bool) -> Agreement:
    """Puts the tables of all ranks together.

    Args:
        tables: One per rank of the save or load, in rank order.
        needs_all_ranks: Whether every rank of a tensor's mesh must be among the tables (a save writes the tensor
            from them), or only what is reported is looked at.
    """
    problems = [problem for table in tables for problem in table.problems]
    by_key: dict[str, dict[int, KeyEntry]] = {}
    for rank, table in enumerate(tables):
        for fqn, entry in table.entries.items():
            by_key.setdefault(fqn, {})[rank] = entry
    keys: dict[str, TensorAgreement | ObjectAgreement] = {}
    meshes = _MeshNumbers()
    for fqn, entries in by_key.items():
        agreed = _agree_on_key(fqn, entries, needs_all_ranks, meshes)
        if isinstance(agreed, Problem):
            problems.append(agreed)
        else:
            keys[fqn] = agreed
    return Agreement(keys, tuple(problems))


def compare_replicas(tables: Sequence[KeyTable], agreement: Agreement) -> tuple[ReplicaComparison, list[str]]:
    """What digests say of replicas, and the keys that are equal on several meshes."""
    found = ReplicaComparison([], [], [], [])
    equal = []
    for fqn, agreed in agreement.keys.items():
        digests = [table.digests.get(fqn, b"") for table in tables]
        if isinstance(agreed, ObjectAgreement) or agreed.is_plain:
            ranks = agreed.ranks if isinstance(agreed, ObjectAgreement) else _all_ranks(agreed)
            if (pair := _unequal(ranks, digests)) is not None:
                found.differing.append(_replica_problem(fqn, agreed, *pair, digests))
            continue
        alike: dict[tuple[Box, ...], list[tuple[int, ...]]] = {}
        for held in (held for replica in agreed.replicas for held in replica):
            alike.setdefault(held.boxes, []).append(held.ranks)
        declared = [pair for sides in alike.values() for ranks in sides if (pair := _unequal(ranks, digests))]
        joined = [[rank for ranks in sides for rank in ranks if digests[rank]] for sides in alike.values()]
        across = [pair for ranks in joined if (pair := _unequal(ranks, digests))]
        is_on_meshes = all(
            isinstance(entry := table.entries.get(fqn), TensorEntry) and entry.report.mesh is not None
            for table in tables
            if fqn in table.entries
        )
        is_comparable = all(len(sides) == len(agreed.replicas) for sides in alike.values())
        is_lacking = num_elements(agreed.global_shape) > 0 and any(not digests[rank] for rank in _all_ranks(agreed))
        first_steps = {agreed.steps[rank] for rank in _all_ranks(agreed)} if agreed.steps else {()}
        if declared:
            found.differing.append(_replica_problem(fqn, agreed, *declared[0], digests))
        elif across and is_on_meshes:
            found.presumed.append(_presumed_problem(fqn, agreed, *across[0], digests))
        elif across:
            found.differing.append(_replica_problem(fqn, agreed, *across[0], digests))
        elif len(agreed.replicas) > 1 and (not is_comparable or is_lacking):
            words = f"{_on_meshes(agreed)}, in different layouts or on some ranks without a digest"
            advice = "; give different tensors different keys, and shard replicas alike"
            found.uncompared.append(Problem("replicas_differ", fqn, words, advice))
        elif len(agreed.replicas) > 1 and len(first_steps) == 1:
            equal.append(fqn)
    return found, equal


def _all_ranks(agreed: TensorAgreement) -> list[int]:
    return sorted({rank for replica in agreed.replicas for held in replica for rank in held.ranks})


def _unequal(ranks: Sequence[int], digests: Sequence[bytes]) -> tuple[int, int] | None:
    """The first rank with a digest and the first that has another, or none."""
    first = next((rank for rank in ranks if digests[rank]), None)
    other = next((rank for rank in ranks if first is not None and digests[rank] != digests[first]), None)
    return None if first is None or other is None else (first, other)


def _on_meshes(agreed: TensorAgreement) -> str:
    ranks = [sorted({rank for held in replica for rank in held.ranks}) for replica in agreed.replicas]
    words = [f"[{named(of_mesh, 8)}]" for of_mesh in ranks[:4]] + [f"{len(ranks) - 4} more"] * (len(ranks) > 4)
    return f"is a tensor on each of several meshes ({' | '.join(words)})"


def _values(first: int, other: int, digests: Sequence[bytes]) -> str | None:
    """Of values that the tests make: b"r" and the text of the value; digests have 16 bytes."""
    sides = [digests[rank] for rank in (first, other)]
    texts = [side[1:].decode() if 0 < len(side) < 16 else "" for side in sides]
    if not any(texts):
        return None
    names = [side.hex()[:12] or "none" for side in sides]
    return " and ".join(text or f"a value with digest {name}" for text, name in zip(texts, names, strict=True))


def _presumed_problem(fqn: str, agreed: TensorAgreement, first: int, other: int, digests: Sequence[bytes]) -> Problem:
    held = _values(first, other, digests) or "different bits"
    return Problem(
        "replicas_differ",
        fqn,
        f"{_on_meshes(agreed)}, and ranks {first} and {other} hold {held}",
        "; give different tensors different keys; make replicas equal first: tte.sync_module_states(model, mesh) with "
        "a mesh that holds all of these ranks",
    )


def _replica_problem(
    fqn: str, agreed: TensorAgreement | ObjectAgreement, first: int, other: int, digests: Sequence[bytes]
) -> Problem:
    names = [digests[rank].hex()[:12] or "none" for rank in (first, other)]
    lowest = "SavePlanner(replicas='first')"
    what, remedy = (
        ("values", f"give each rank a key of its own (such as rank_0), or save one rank's value with {lowest}")
        if isinstance(agreed, ObjectAgreement)
        else ("bits", f"make the replicas equal first, or save the lowest rank's with {lowest}")
    )
    held = _values(first, other, digests) or f"{what} with digests {names[0]} and {names[1]}"
    detail = f"ranks {first} and {other} should hold the same, got {held}"
    return Problem("replicas_differ", fqn, detail, f"; {remedy}")


class _MeshNumbers:
    """Numbers equal meshes alike. Comparing two meshes costs a pass over their ranks: once per table, not per key."""

    def __init__(self) -> None:
        self._by_mesh: dict[MeshLayout | None, int] = {}
        self._by_identity: dict[int, int] = {}

    def number(self, mesh: MeshLayout | None) -> int:
        if id(mesh) not in self._by_identity:
            self._by_identity[id(mesh)] = self._by_mesh.setdefault(mesh, len(self._by_mesh))
        return self._by_identity[id(mesh)]


def _agree_on_key(
    fqn: str, entries: Mapping[int, KeyEntry], needs_all_ranks: bool, meshes: _MeshNumbers
) -> TensorAgreement | ObjectAgreement | Problem:
    first_rank, first = next(iter(entries.items()))
    for rank, entry in entries.items():
        for what, of_first, of_other in zip(("a", "dtype", "shape"), _traits(first), _traits(entry), strict=True):
            if of_first != of_other:
                return Problem(
                    "ranks_disagree",
                    fqn,
                    f"rank {first_rank} has {what} {of_first}, rank {rank} has {what} {of_other}; "
                    "give different values different keys",
                )
    if isinstance(first, ObjectEntry):
        return ObjectAgreement(tuple(entries))
    if isinstance(first, BoxesEntry):
        of_ranks = {rank: entry for rank, entry in entries.items() if isinstance(entry, BoxesEntry)}
        return _agree_on_boxes(fqn, first, of_ranks, needs_all_ranks)
    reports = {rank: entry.report for rank, entry in entries.items() if isinstance(entry, TensorEntry)}
    return _agree_on_layouts(fqn, first, reports, needs_all_ranks, meshes)


def _traits(entry: KeyEntry) -> tuple[str, str, str]:
    if isinstance(entry, ObjectEntry):
        return ("non-tensor value", "", "")
    shape = entry.global_shape if isinstance(entry, BoxesEntry) else entry.report.global_shape
    kind = "tensor that describes itself" if isinstance(entry, BoxesEntry) else "tensor"
    return (kind, str(entry.dtype), str(tuple(shape)))


def _agree_on_boxes(
    fqn: str, first: BoxesEntry, entries: Mapping[int, BoxesEntry], needs_all_ranks: bool
) -> TensorAgreement | Problem:
    holders: dict[Box, list[int]] = {}
    for rank, entry in entries.items():
        for box in entry.boxes:
            holders.setdefault(box, []).append(rank)
    shards = tuple(HeldShard(tuple(ranks), (box,)) for box, ranks in holders.items() if num_elements(box[1]) > 0)
    problem = _cover_problem(fqn, first.global_shape, shards)
    if problem is not None and (needs_all_ranks or problem.detail.startswith("out of bounds")):
        return problem
    replicas = (_with_empty_shard(first.global_shape, shards, tuple(entries)),)
    return TensorAgreement(first.global_shape, first.dtype, False, False, {}, replicas)


def _agree_on_layouts(
    fqn: str,
    first: TensorEntry,
    reports: Mapping[int, ShardReport],
    needs_all_ranks: bool,
    meshes: _MeshNumbers,
) -> TensorAgreement | Problem:
    groups: dict[object, list[int]] = {}
    for rank, report in reports.items():
        alone = rank if report.mesh is None else None
        groups.setdefault((meshes.number(report.mesh), report.placements, report.order, alone), []).append(rank)
    steps_of: dict[int, Steps] = {}
    replicas: list[tuple[HeldShard, ...]] = []
    for ranks in groups.values():
        members = [reports[rank] for rank in ranks]
        steps = decide(fqn, members)
        if isinstance(steps, Problem):
            return steps
        steps_of.update(dict.fromkeys(ranks, steps))
        shards = _held_shards(ranks, members, steps)
        if needs_all_ranks:
            absent = missing_ranks(members)
            if absent:
                return _absent_problem(fqn, members[0], absent)
            problem = _cover_problem(fqn, first.report.global_shape, shards)
            if problem is not None:
                return problem
        replicas.append(_with_empty_shard(first.report.global_shape, shards, tuple(ranks)))
    is_plain = all(report.mesh is None for report in reports.values())
    return TensorAgreement(
        first.report.global_shape, first.dtype, first.requires_grad, is_plain, steps_of, tuple(replicas)
    )


def _cover_problem(fqn: str, global_shape: tuple[int, ...], shards: Sequence[HeldShard]) -> Problem | None:
    boxes = [box for shard in shards for box in shard.boxes]
    owners = [shard.ranks[0] for shard in shards for _ in shard.boxes]
    defect = _core.describe_cover_defect(global_shape, boxes, owners)
    return None if defect is None else Problem("incomplete_cover", fqn, defect)


def _held_shards(ranks: Sequence[int], reports: Sequence[ShardReport], steps: Steps) -> tuple[HeldShard, ...]:
    by_replica_key: dict[tuple[int, ...], list[int]] = {}
    for position, report in enumerate(reports):
        by_replica_key.setdefault(replica_key(report), []).append(position)
    shards = []
    for positions in by_replica_key.values():
        chunks = shard_of(reports[positions[0]], steps).chunks
        if chunks:
            boxes = tuple((chunk.offsets, chunk.sizes) for chunk in chunks)
            shards.append(HeldShard(tuple(ranks[position] for position in positions), boxes))
    return tuple(shards)


def _with_empty_shard(
    global_shape: tuple[int, ...], shards: tuple[HeldShard, ...], ranks: tuple[int, ...]
) -> tuple[HeldShard, ...]:
    """A tensor without elements is still a key of the checkpoint: all ranks hold its one empty box."""
    if num_elements(global_shape) > 0:
        return shards
    return (HeldShard(ranks, (((0,) * len(global_shape), global_shape),)),)


def _absent_problem(fqn: str, report: ShardReport, absent: Sequence[int]) -> Problem:
    assert report.mesh is not None
    return Problem(
        "incomplete_cover",
        fqn,
        f"rank(s) {', '.join(map(str, absent[:8]))}{', ...' if len(absent) > 8 else ''} of its mesh ({report.mesh}), "
        f"placements {format_placements(report.placements)}, take no part; "
        "pass a process group that holds the whole mesh",
    )


def shards_to_write(agreed: TensorAgreement, is_equal: bool = False) -> Sequence[HeldShard]:
    """One replica's shards; plain tensors, complete on each rank, become one shard that all of them hold.

    Args:
        is_equal: Whether all meshes hold the same.
    """
    if is_equal:
        shards = [held for replica in agreed.replicas for held in replica]
        return tuple(
            HeldShard(tuple(rank for held in shards if held.boxes == first.boxes for rank in held.ranks), first.boxes)
            for first in agreed.replicas[0]
        )
    if not agreed.is_plain:
        return agreed.replicas[0]
    ranks = tuple(rank for (held,) in agreed.replicas for rank in held.ranks)
    return (HeldShard(ranks, agreed.replicas[0][0].boxes),)


def num_bytes(agreed: TensorAgreement, held: HeldShard) -> int:
    """Of one shard."""
    return sum(num_elements(sizes) for _, sizes in held.boxes) * agreed.dtype.itemsize


def replica_key(report: ShardReport) -> tuple[int, ...]:
    """The coordinate with 0 on every axis that replicates: equal for ranks that hold equal shards."""
    return tuple(index if dim >= 0 else 0 for index, (dim, _) in zip(report.coordinate, report.placements, strict=True))


def missing_ranks(reports: Sequence[ShardReport]) -> list[int]:
    """Global ranks of the mesh of these reports that did not report."""
    mesh = reports[0].mesh
    if mesh is None:
        return []
    seen = {mesh.ranks[mesh_coordinates(mesh.shape).index(report.coordinate)] for report in reports}
    return [rank for rank in mesh.ranks if rank not in seen]
