"""What all ranks' key tables say together, key by key and rank by rank: slow, obvious, the oracle of ``agreement``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_ext.checkpoint.agreement import HeldShard, ObjectAgreement, TensorAgreement, check_cover
from torchtitan_ext.checkpoint.key_table import Box, BoxesEntry, KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import (
    MeshLayout,
    ShardReport,
    Steps,
    decide,
    format_placements,
    mesh_coordinates,
    num_elements,
    shard_of,
)


@dataclass(frozen=True)
class Agreement:
    """What the tables say together; ``keys`` lacks those with a problem."""

    keys: Mapping[str, TensorAgreement | ObjectAgreement]
    problems: tuple[Problem, ...]


def agree(tables: Sequence[KeyTable], *, every_rank_reports: bool) -> Agreement:
    """Puts the tables of all ranks together.

    Args:
        tables: One per rank of the save or load, in rank order.
        every_rank_reports: Whether every rank of a tensor's mesh must be among the tables (a save writes the tensor
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
        agreed = _agree_on_key(fqn, entries, every_rank_reports, meshes)
        if isinstance(agreed, Problem):
            problems.append(agreed)
        else:
            keys[fqn] = agreed
    return Agreement(keys, tuple(problems))


def differing_replicas(tables: Sequence[KeyTable], agreement: Agreement) -> list[Problem]:
    """Replicas whose values differ, as far as digests tell: one problem per key."""
    problems = []
    for fqn, agreed in agreement.keys.items():
        if isinstance(agreed, ObjectAgreement):
            groups: list[tuple[int, ...]] = [agreed.ranks]
        elif agreed.is_plain:
            groups = [tuple(held.ranks[0] for (held,) in agreed.replicas)]
        else:
            alike: dict[tuple[Box, ...], tuple[int, ...]] = {}
            for held in (held for replica in agreed.replicas for held in replica):
                alike[held.boxes] = (*alike.get(held.boxes, ()), *held.ranks)
            groups = list(alike.values())
        for ranks in groups:
            first = next((rank for rank in ranks if fqn in tables[rank].digests), None)
            other = next(
                (r for r in ranks if first is not None and tables[r].digests.get(fqn) != tables[first].digests[fqn]),
                None,
            )
            if first is not None and other is not None:
                problems.append(_replica_problem(fqn, agreed, first, other, tables))
                break
    return problems


def uncompared_replicas(tables: Sequence[KeyTable], agreement: Agreement) -> list[Problem]:
    """Keys that stand for tensors on several meshes whose values no digest compares: one of them is saved."""
    problems = []
    for fqn, agreed in agreement.keys.items():
        if isinstance(agreed, ObjectAgreement) or agreed.is_plain or len(agreed.replicas) < 2:
            continue
        held = [shard for replica in agreed.replicas for shard in replica]
        if any(fqn not in tables[rank].digests for shard in held for rank in shard.ranks):
            ranks = [sorted({rank for shard in replica for rank in shard.ranks}) for replica in agreed.replicas]
            meshes = " | ".join(map(str, ranks[:4]))
            what = f"is a tensor on each of several meshes ({meshes}), of which the first is saved"
            problems.append(Problem("replicas_differ", fqn, f"{what}; give different tensors different keys"))
    return problems


def _replica_problem(
    fqn: str, agreed: TensorAgreement | ObjectAgreement, first: int, other: int, tables: Sequence[KeyTable]
) -> Problem:
    digests = [tables[rank].digests.get(fqn, b"").hex()[:12] or "none" for rank in (first, other)]
    what, remedy = (
        ("values", "give each rank a key of its own (such as rank_0), or save one rank's value with replicas='first'")
        if isinstance(agreed, ObjectAgreement)
        else ("bits", "make the replicas equal first, or save the lowest rank's with replicas='first'")
    )
    return Problem(
        "replicas_differ",
        fqn,
        f"ranks {first} and {other} should hold the same, got {what} with digests {digests[0]} and {digests[1]}; "
        f"{remedy}",
    )


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
    fqn: str, entries: Mapping[int, KeyEntry], every_rank_reports: bool, meshes: _MeshNumbers
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
        return _agree_on_boxes(fqn, first, of_ranks, every_rank_reports)
    reports = {rank: entry.report for rank, entry in entries.items() if isinstance(entry, TensorEntry)}
    return _agree_on_layouts(fqn, first, reports, every_rank_reports, meshes)


def _traits(entry: KeyEntry) -> tuple[str, str, str]:
    if isinstance(entry, ObjectEntry):
        return ("non-tensor value", "", "")
    shape = entry.global_shape if isinstance(entry, BoxesEntry) else entry.report.global_shape
    kind = "tensor that describes itself" if isinstance(entry, BoxesEntry) else "tensor"
    return (kind, str(entry.dtype), str(tuple(shape)))


def _agree_on_boxes(
    fqn: str, first: BoxesEntry, entries: Mapping[int, BoxesEntry], every_rank_reports: bool
) -> TensorAgreement | Problem:
    holders: dict[Box, list[int]] = {}
    for rank, entry in entries.items():
        for box in entry.boxes:
            holders.setdefault(box, []).append(rank)
    shards = tuple(HeldShard(tuple(ranks), (box,)) for box, ranks in holders.items() if num_elements(box[1]) > 0)
    problem = check_cover(fqn, first.global_shape, shards, "incomplete_cover")
    if problem is not None and (every_rank_reports or problem.detail.startswith("out of bounds")):
        return problem
    replicas = (_with_empty_shard(first.global_shape, shards, tuple(entries)),)
    return TensorAgreement(first.global_shape, first.dtype, False, False, {}, replicas)


def _agree_on_layouts(
    fqn: str,
    first: TensorEntry,
    reports: Mapping[int, ShardReport],
    every_rank_reports: bool,
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
        if every_rank_reports:
            absent = missing_ranks(members)
            if absent:
                return _absent_problem(fqn, members[0], absent)
            problem = check_cover(fqn, first.report.global_shape, shards, "incomplete_cover")
            if problem is not None:
                return problem
        replicas.append(_with_empty_shard(first.report.global_shape, shards, tuple(ranks)))
    is_plain = all(report.mesh is None for report in reports.values())
    return TensorAgreement(
        first.report.global_shape, first.dtype, first.requires_grad, is_plain, steps_of, tuple(replicas)
    )


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


def shards_to_write(agreed: TensorAgreement) -> Sequence[HeldShard]:
    """One replica's shards; plain tensors, complete on each rank, become one shard that all of them hold."""
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
