"""Replicas that placements do not show: tensors of one name on several slices of the mesh.

FSDP2 over TP holds what its TP plan leaves out on one data-parallel mesh per TP rank:

    mesh (dp 2, tp 2)    ranks 0 1     a norm: shards on the mesh of ranks 0, 2, and again on that of ranks 1, 3;
                               2 3     ranks 0 and 1 should hold the same, and ranks 2 and 3

Where meshes of equal shape hold a tensor in equal layouts, and together are all ranks (of a pipeline: of a stage),
these tensors are *presumed* to be replicas over the missing axes. Experts and hand-made tensor parallelism look the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_ext.ranks.exchange import gather_values
from torchtitan_ext.sync.batches import ReplicaBatches, ReplicaTensor
from torchtitan_ext.sync.calls import Call, digest_of

Name = tuple[str, int | None]
"""A tensor's name, and the pipeline stage of its ranks where there are stages."""


class SliceTensor(NamedTuple):
    """A tensor on a slice, as one rank sends it. All slices must have the same ``kind`` of it."""

    name: Name
    kind: str
    ranks: tuple[int, ...]
    num_peers: int


class SliceDigest(NamedTuple):
    """Digests of all tensors of one rank on one slice, of the slice's ranks, and of the tensors' hashes.

    ``structure`` is of names, layouts and shapes, and of the rank's place among the shards; ``num_peers`` counts the
    ranks that should hold such tensors, on all slices.
    """

    structure: bytes
    mesh: bytes
    num_ranks: int
    num_peers: int
    contents: bytes


def slice_tensor(tensor: ReplicaTensor) -> SliceTensor | None:
    """``None`` for a tensor whose mesh holds all ranks."""
    if tensor.mesh_slice is None:
        return None
    kind = f"{tensor.layout} on {tensor.mesh_slice.shape}, {tensor.local.dtype}"
    name = (tensor.fqn, tensor.mesh_slice.stage)
    return SliceTensor(name, kind, tensor.replica_set[0], tensor.mesh_slice.num_peers)


def presumed_replicas(of_ranks: Iterable[Iterable[SliceTensor]]) -> tuple[set[Name], list[str]]:
    """The tensors on several slices that are presumed to be replicas, and the names of those that cannot be."""
    by_name: dict[Name, list[SliceTensor]] = {}
    for of_rank in of_ranks:
        for tensor in of_rank:
            by_name.setdefault(tensor.name, []).append(tensor)
    several = {name: tensors for name, tensors in by_name.items() if len({tensor.ranks for tensor in tensors}) > 1}
    presumed = {
        name
        for name, tensors in several.items()
        if len({tensor.kind for tensor in tensors}) == 1 and len(tensors) == tensors[0].num_peers
    }
    return presumed, sorted({name[0] for name in several.keys() - presumed})


def agree_on_presumed(found: ReplicaBatches, call: Call) -> frozenset[str]:
    """The names of this rank's tensors that are presumed replicas of those on other slices. Collective."""
    own = [one for tensor in found.tensors if (one := slice_tensor(tensor)) is not None]
    presumed, _ = presumed_replicas(gather_values(own, call.scope, opening=call.opening("presumed replicas")))
    return frozenset(one.name[0] for one in own if one.name in presumed)


def slice_digests(found: ReplicaBatches, hashes: Mapping[int, bytes]) -> tuple[SliceDigest, ...]:
    """One per slice on which this rank holds tensors. ``hashes`` are by ``id``; an empty tensor has none."""
    by_slice: dict[Any, list[ReplicaTensor]] = {}
    for tensor in found.tensors:
        if tensor.mesh_slice is not None:
            key = (tensor.mesh_slice.stage, tensor.mesh_slice.num_peers, tensor.replica_set[0])
            by_slice.setdefault(key, []).append(tensor)
    return tuple(
        SliceDigest(
            digest_of(
                f"{stage} {one.fqn} {one.layout} {one.mesh_slice} {one.local.dtype}{one.local.shape}" for one in tensors
            ),
            digest_of(map(str, ranks)),
            len(ranks),
            num_peers,
            digest_of(hashes.get(id(one), b"").hex() for one in tensors),
        )
        for (stage, num_peers, ranks), tensors in by_slice.items()
    )


def are_slices_equal(of_ranks: Sequence[tuple[SliceDigest, ...]]) -> bool:
    """Whether every slice holds the same tensors, with the same bits."""
    meshes: dict[bytes, set[bytes]] = {}
    contents: dict[bytes, bytes] = {}
    every = [digest for of_rank in of_ranks for digest in of_rank]
    for digest in every:
        meshes.setdefault(digest.structure, set()).add(digest.mesh)
        if contents.setdefault(digest.structure, digest.contents) != digest.contents:
            return False
    return all(len(meshes[digest.structure]) * digest.num_ranks == digest.num_peers for digest in every)
