"""Proves that replicas are equal: ranks hash their tensors and compare the hashes.

The check costs one pass over the tensors and one small exchange, of one digest per process group. Only where digests
differ does a second exchange name the tensors. So a job can check every N steps and find a flipped bit, or a replica
that missed an update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.errors import Problem, check_argument, named, warn
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.ranks.exchange import check_usable, gather_values, scope_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks
from torchtitan_ext.state.value_digest import bit_sums, scalar_text
from torchtitan_ext.sync.batches import ReplicaBatches, ReplicaTensor
from torchtitan_ext.sync.calls import Buffers, Call, CheckCall, ModuleCall, outside_graphs
from torchtitan_ext.sync.replicas import collect_replicas
from torchtitan_ext.sync.same_call import are_equal, confirm_same_call
from torchtitan_ext.sync.slices import SliceTensor, presumed_replicas, slice_digests, slice_tensor
from torchtitan_ext.sync.tensors import ModuleOrState


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose replicas are not equal.

    Attributes:
        fqn: The tensor's name.
        ranks: Global ranks that hold the tensor, grouped by equal bits; the group of the lowest rank first.
        coordinates: The same ranks as coordinates on the tensor's mesh.
        values: The value in each group, where the tensor has one element; else empty.
    """

    fqn: str
    ranks: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[tuple[int, ...], ...], ...]
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.problem())

    def problem(self) -> Problem:
        """The difference as a line of a report."""
        sides = " | ".join(
            ", ".join(f"rank {rank} at {where}" for rank, where in zip(ranks, places, strict=True))
            for ranks, places in zip(self.ranks, self.coordinates, strict=True)
        )
        if self.values:
            held = (f"{value} on {ranks}" for value, ranks in zip(self.values, sides.split(" | "), strict=True))
            return Problem("replicas_differ", self.fqn, f"is {', '.join(held)}")
        return Problem("replicas_differ", self.fqn, f"equal bits within each of {sides}")


class ReplicaDifferences(tuple[ReplicaDifference, ...]):
    """The tensors that differ.

    Attributes:
        uncompared: Names of tensors on several meshes that were not compared between the meshes, because their layouts
            differ or not all ranks hold them.
    """

    uncompared: tuple[str, ...] = ()


@outside_graphs
def check_replicas(
    module: ModuleOrState,
    mesh: DeviceMesh | None = None,
    *,
    params: bool = True,
    buffers: Buffers = "all",
    ignore: Collection[str] = (),
) -> ReplicaDifferences:
    """Compares all replicas of the tensors of a module or state dict, bit by bit, through 64-bit hashes.

    Tensors of one name on several meshes of one shape that together are all ranks (norms that a TP plan leaves out) are
    presumed to be replicas and compared too; between the stages of a mesh with an axis "pp" they are not. Experts and
    hand-made tensor parallelism look the same: ``ignore`` those.

    Collective over the same ranks as ``sync_module_states``, whose arguments mean the same here. Changes nothing, but
    leaves FSDP2 modules resharded.

    Returns:
        The tensors that differ, as a tuple that is the same on every rank; empty where all replicas are equal. Two
        different replicas pass for equal with a probability of 2^-64. A warning names the tensors on several meshes
        that could not be compared between the meshes; so does the tuple's attribute ``uncompared``.

    Raises:
        SyncMismatchError: Ranks disagree on names, shapes or dtypes, or a tensor cannot be compared.
        WrongArgumentError: On some rank ``module`` has another type. A ``TypeError``.
        LostRankError: A rank is gone, or does not take part.
    """
    check_argument("check_replicas", "mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh")
    if mesh is not None and mesh.get_coordinate() is None:
        return ReplicaDifferences()
    check_usable("check_replicas", mesh)
    call = CheckCall("check_replicas", mesh, params, buffers, ignore)
    differences = compare_replicas(call, collect_replicas(module, call))
    if differences.uncompared:
        warn(
            "check_replicas: some tensors on several meshes were not compared between them, because layouts differ or "
            f"not all ranks hold them: {named(differences.uncompared)}; shard replicas alike, or pass mesh= of the "
            "ranks that share them"
        )
    return differences


def compare_replicas(call: ModuleCall, found: ReplicaBatches) -> ReplicaDifferences:
    """``check_replicas`` of tensors that are collected already. Collective over the scope of the call.

    The replicas that ``check_replicas`` presumes on several meshes are compared for a ``CheckCall`` alone.
    """
    across_slices = isinstance(call, CheckCall)
    hashes: dict[int, bytes] = {}
    if not found.problems:
        hashes, problems = hash_locals(found.tensors)
        found.problems += problems
    contents = {
        key: hashlib.blake2b(
            b"".join(hashes[id(tensor)] for tensor in batch.tensors if id(tensor) in hashes), digest_size=16
        ).digest()
        for key, batch in found.batches.items()
    }
    with naming_lost_ranks(call.operation, "replicas were compared", call.scope):
        slices = slice_digests(found, hashes) if across_slices else ()
        if are_equal(confirm_same_call(call, found, contents, slices)):
            return ReplicaDifferences()
        differences, uncompared = _name_differences(call, found, hashes, across_slices)
        assert differences or slices, "replicas differ, but none by name; please report"
        result = ReplicaDifferences(differences)
        result.uncompared = tuple(uncompared)
        return result


def hash_locals(tensors: Sequence[ReplicaTensor]) -> tuple[dict[int, bytes], list[Problem]]:
    """A hash of the bits of each tensor and their places, by the tensor's ``id``; an empty tensor has none.

    One pass, one transfer per device. A failure becomes a problem: every rank must get it.
    """
    held = {id(tensor): tensor.local for tensor in tensors if tensor.local.numel() > 0 and not tensor.local.is_meta}
    sums, errors = bit_sums(held)
    problems = [
        Problem("cannot_sync", tensor.fqn, f"cannot be read: {str(error).removeprefix('fingerprint_shard: ')}")
        for tensor in tensors
        if (error := errors.get(id(tensor))) is not None
    ]
    return {key: number.to_bytes(8, "little", signed=True) for key, number in sums.items()}, problems


class _HashedTensor(NamedTuple):
    """One rank's replica, as it is sent. ``text`` is the value of a tensor of one element."""

    fqn: str
    replica_set: tuple[Any, ...]
    place: Any
    coordinate: tuple[int, ...]
    bits: bytes
    text: str
    on_slice: SliceTensor | None


def _name_differences(
    call: Call, found: ReplicaBatches, hashes: dict[int, bytes], across_slices: bool
) -> tuple[tuple[ReplicaDifference, ...], list[str]]:
    """The differences, and the names of tensors that could not be compared between meshes."""
    own = [_hashed(tensor, hashes.get(id(tensor), b""), across_slices) for tensor in found.tensors]
    gathered = gather_values(own, call.scope, opening=call.opening("names of replicas that differ"))
    presumed, uncompared = presumed_replicas([one.on_slice for one in of_rank if one.on_slice] for of_rank in gathered)
    replicas: dict[tuple[str, Any], dict[bytes, list[tuple[int, _HashedTensor]]]] = {}
    for rank, of_rank in zip(scope_ranks(call.scope), gathered, strict=True):
        for one in of_rank:
            is_presumed = one.on_slice is not None and one.on_slice.name in presumed
            key = (one.fqn, one.place if is_presumed else one.replica_set)
            replicas.setdefault(key, {}).setdefault(one.bits, []).append((rank, one))
    differences = []
    for (fqn, _), by_bits in replicas.items():
        if len(by_bits) > 1:
            groups = sorted(by_bits.values(), key=lambda group: group[0][0])
            ranks = tuple(tuple(rank for rank, _ in group) for group in groups)
            coordinates = tuple(tuple(one.coordinate for _, one in group) for group in groups)
            texts = tuple(group[0][1].text for group in groups)
            differences.append(ReplicaDifference(fqn, ranks, coordinates, values=texts if all(texts) else ()))
    return tuple(sorted(differences, key=lambda difference: (difference.fqn, difference.ranks))), uncompared


def _hashed(tensor: ReplicaTensor, bits: bytes, across_slices: bool) -> _HashedTensor:
    local, on_slice = tensor.local, slice_tensor(tensor) if across_slices else None
    element = as_bytes(local.cpu()).numpy().tobytes() if local.numel() == 1 and not local.is_meta else b""
    text = scalar_text(element, local.dtype) if element else ""
    place = (tensor.mesh_slice, tuple(local.shape))
    return _HashedTensor(tensor.fqn, tensor.replica_set, place, tensor.coordinate, bits, text, on_slice)
