"""Replicas that placements do not show: tensors of one name on meshes that share no rank.

FSDP2 over TP holds what its TP plan leaves out on one data-parallel mesh per TP rank:

    mesh (dp 2, tp 2)    ranks 0 1     a norm: shards on the mesh of ranks 0, 2, and again on that of ranks 1, 3;
                               2 3     ranks 0 and 1 should hold the same, and ranks 2 and 3

Where meshes of equal shape hold a tensor in equal layouts, and together are all ranks (of a pipeline: of a stage),
these tensors are *presumed* to be replicas over the missing axes. Experts and hand-made tensor parallelism look the
same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_ext.ranks.exchange import Scope, gather_values
from torchtitan_ext.sync.replicas import Replicas, ReplicaTensor

Name = tuple[str, int | None]
"""A tensor's name, and the pipeline stage of its ranks, where there are any."""


class HeldPart(NamedTuple):
    """What a rank says of a tensor on a mesh that not all ranks are on. ``kind``: what must be equal on all meshes."""

    name: Name
    kind: str
    ranks: tuple[int, ...]
    num_peers: int


class PartSummary(NamedTuple):
    """What a rank says of all its tensors on one such mesh.

    Attributes:
        structure: Digest of the names, layouts and shapes of the tensors, and of the rank's place among the shards.
        mesh: Digest of the mesh's ranks.
        num_ranks, num_peers: Of the mesh; of all ranks that should hold such tensors.
        contents: Digest of the tensors' hashes.
    """

    structure: bytes
    mesh: bytes
    num_ranks: int
    num_peers: int
    contents: bytes


def held_part(tensor: ReplicaTensor) -> HeldPart | None:
    """``None`` for a tensor whose mesh holds all ranks."""
    part = tensor.part
    if part is None:
        return None
    kind = f"{tensor.layout} on {part.mesh_shape}, {tensor.local.dtype}"
    return HeldPart((tensor.fqn, part.stage), kind, tensor.replica_set[0], part.num_peers)


def presumed_names(parts_of_ranks: Iterable[Iterable[HeldPart]]) -> tuple[set[Name], list[str]]:
    """Which tensors on several meshes are presumed to be replicas, and the names of those that cannot be.

    Args:
        parts_of_ranks: Of all ranks of the call.
    """
    by_name: dict[Name, list[HeldPart]] = {}
    for parts in parts_of_ranks:
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
    presumed: set[Name] = set()
    others: list[str] = []
    for name, parts in by_name.items():
        if len({part.ranks for part in parts}) < 2:
            continue
        if len({part.kind for part in parts}) == 1 and len(parts) == parts[0].num_peers:
            presumed.add(name)
        else:
            others.append(name[0])
    return presumed, sorted(set(others))


def agree_on_presumed(found: Replicas, scope: Scope) -> frozenset[str]:
    """The names of this rank's tensors that are presumed replicas of those on other meshes. Collective."""
    own = [part for tensor in found.tensors if (part := held_part(tensor)) is not None]
    presumed, _ = presumed_names(gather_values(own, scope))
    return frozenset(part.name[0] for part in own if part.name in presumed)


def summaries(found: Replicas, hashes: Mapping[int, bytes]) -> tuple[PartSummary, ...]:
    """One per mesh that not all ranks are on.

    Args:
        hashes: Of each tensor's memory, by ``id``; none for an empty one.
    """
    of_mesh: dict[Any, list[ReplicaTensor]] = {}
    for tensor in found.tensors:
        if tensor.part is not None:
            of_mesh.setdefault((tensor.part.stage, tensor.part.num_peers, tensor.replica_set[0]), []).append(tensor)
    return tuple(
        PartSummary(
            _digest(f"{stage} {one.fqn} {one.layout} {one.part} {one.local.dtype}{one.local.shape}" for one in tensors),
            _digest(map(str, ranks)),
            len(ranks),
            num_peers,
            _digest(hashes.get(id(one), b"").hex() for one in tensors),
        )
        for (stage, num_peers, ranks), tensors in of_mesh.items()
    )


def are_parts_equal(of_ranks: Sequence[tuple[PartSummary, ...]]) -> bool:
    """Whether all tensors on such meshes are held alike on all of them, and are equal."""
    meshes: dict[bytes, set[bytes]] = {}
    contents: dict[bytes, bytes] = {}
    every = [summary for of_rank in of_ranks for summary in of_rank]
    for summary in every:
        meshes.setdefault(summary.structure, set()).add(summary.mesh)
        if contents.setdefault(summary.structure, summary.contents) != summary.contents:
            return False
    return all(len(meshes[summary.structure]) * summary.num_ranks == summary.num_peers for summary in every)


def _digest(texts: Iterable[str]) -> bytes:
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).digest()
