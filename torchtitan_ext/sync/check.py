"""Proof that replicas are equal: hashes of all tensors, compared between the ranks that hold them alike.

Costs one pass over the tensors and one small exchange, of one digest per process group; only where that differs a
second exchange names the tensors, and on request two more the first element. So it can run every N steps, and finds
what drifts: a flipped bit, a replica that missed an update.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.errors import Problem, check_argument, named
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.ranks.exchange import Scope, check_usable, gather_values, scope_ranks
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks
from torchtitan_ext.state.value_digest import bit_sum, fetch_sums, scalar_text
from torchtitan_ext.sync.named_tensors import ModuleOrState
from torchtitan_ext.sync.options import Buffers, Options
from torchtitan_ext.sync.outside_graphs import outside_graphs
from torchtitan_ext.sync.presumed import HeldPart, held_part, presumed_names, summaries
from torchtitan_ext.sync.replicas import Replicas, ReplicaTensor, collect_replicas
from torchtitan_ext.sync.same_call import are_equal, confirm_same_call

# What is sent per tensor to find the first difference: a digest per block, then one block.
_BLOCK_BYTES = 64 * 1024
# Tensors in which the first difference is looked for.
_MAX_LOCATED = 10


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose replicas are not equal.

    Attributes:
        fqn: Its name.
        ranks: Global ranks that hold it, grouped by equal bits; the group of the lowest rank first.
        coordinates: The same ranks as coordinates on the tensor's mesh.
        first_index: Where in the local tensor the first difference lies; ``None`` if it was not looked for.
        values: Of tensors of one element what each of these groups holds; else empty.
    """

    fqn: str
    ranks: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[tuple[int, ...], ...], ...]
    first_index: tuple[int, ...] | None = None
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
        where = "" if self.first_index is None else f", first at {self.first_index} of the local tensor"
        return Problem("replicas_differ", self.fqn, f"equal bits within each of {sides}{where}")


class ReplicaDifferences(tuple[ReplicaDifference, ...]):
    """The tensors that differ.

    Attributes:
        uncompared: Names of tensors that lie on each of several meshes and were not compared between these, because
            their layouts differ or not all ranks hold them.
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
    locate: bool = False,
) -> ReplicaDifferences:
    """Compares all replicas of the tensors of a module or state dict, bit by bit, through 64-bit hashes.

    Tensors of one name on several meshes of one shape that together are all ranks (norms that a TP plan leaves out) are
    presumed to be replicas and compared too; between the stages of a mesh with an axis "pp" they are not. Experts and
    hand-made tensor parallelism look the same: ``ignore`` those.

    Collective over the same ranks as ``sync_module_states``, with the same meaning of its arguments. Nothing is
    changed, but that FSDP2 modules are left resharded.

    Args:
        locate: Whether to look for the first differing element, of ten tensors at most.

    Returns:
        The tensors that differ, as a tuple that is the same on every rank; empty where all replicas are equal. Two
        different replicas pass for equal with a probability of 2^-64. What lies on several meshes and could not be
        compared between them is warned of, and named in its attribute ``uncompared``.

    Raises:
        SyncMismatchError: Ranks disagree on names, shapes or dtypes, or a tensor cannot be compared.
        WrongArgumentError: ``module`` is something else, on some rank. A ``TypeError``.
        LostRankError: A rank is gone, or does not take part.
    """
    check_argument("check_replicas", "mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh")
    if mesh is not None and mesh.get_coordinate() is None:
        return ReplicaDifferences()
    check_usable("check_replicas", mesh)
    options = Options(params=params, buffers=buffers, ignore=ignore, locate=locate)
    collected = collect_replicas(module, mesh, options)
    differences = compare_replicas("check_replicas", mesh, options, collected, across_meshes=True)
    if differences.uncompared:
        warnings.warn(
            "check_replicas: on several meshes, and not compared between them, because layouts differ or not all ranks "
            f"hold them: {named(differences.uncompared)}; shard replicas alike, or pass mesh= of the ranks that share "
            "them",
            stacklevel=2,
        )
    return differences


def compare_replicas(
    operation: str, scope: Scope, options: Options, found: Replicas, *, across_meshes: bool
) -> ReplicaDifferences:
    """``check_replicas`` of what is already collected. Collective over the scope.

    Args:
        across_meshes: Whether tensors of one name on several meshes are presumed to be replicas.
    """
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
    with naming_lost_ranks(operation, "replicas were compared", scope):
        parts = summaries(found, hashes) if across_meshes else ()
        if are_equal(confirm_same_call(operation, scope, options, found, contents, parts)):
            return ReplicaDifferences()
        differences, uncompared = _name_differences(scope, found, hashes, across_meshes)
        assert differences or parts, "replicas differ, but none by name; please report"
        result = ReplicaDifferences(_located(scope, found, differences) if options.locate else differences)
        result.uncompared = tuple(uncompared)
        return result


def hash_locals(tensors: Sequence[ReplicaTensor]) -> tuple[dict[int, bytes], list[Problem]]:
    """Of each tensor's memory a hash of its bits and their places, by ``id``, and what has none.

    One pass, one transfer per device. What fails on this rank alone all must hear of.
    """
    sums: dict[int, Tensor] = {}
    problems = []
    with torch.no_grad():
        for tensor in tensors:
            if tensor.local.numel() == 0 or tensor.local.is_meta:
                continue
            try:
                sums[id(tensor)] = bit_sum(tensor.local)
            except Exception as error:
                text = str(error).removeprefix("fingerprint_shard: ")
                problems.append(Problem("cannot_sync", tensor.fqn, f"cannot be read: {text}"))
        hashes = {key: number.to_bytes(8, "little", signed=True) for key, number in fetch_sums(sums).items()}
    return hashes, problems


class _Held(NamedTuple):
    """What a rank tells of one of its tensors; ``text``: the value of one element."""

    fqn: str
    replica_set: tuple[Any, ...]
    place: Any
    coordinate: tuple[int, ...]
    value: bytes
    text: str
    part: HeldPart | None


def _name_differences(
    scope: Scope, found: Replicas, hashes: dict[int, bytes], across_meshes: bool
) -> tuple[tuple[ReplicaDifference, ...], list[str]]:
    """The differences, and what could not be compared between meshes."""
    own = [_held(tensor, hashes.get(id(tensor), b""), across_meshes) for tensor in found.tensors]
    gathered = gather_values(own, scope)
    presumed, uncompared = presumed_names([one.part for one in of_rank if one.part] for of_rank in gathered)
    sides: dict[tuple[str, Any], dict[bytes, list[tuple[int, _Held]]]] = {}
    for rank, of_rank in zip(scope_ranks(scope), gathered, strict=True):
        for one in of_rank:
            is_presumed = one.part is not None and one.part.name in presumed
            where = (one.fqn, one.place if is_presumed else one.replica_set)
            sides.setdefault(where, {}).setdefault(one.value, []).append((rank, one))
    differences = []
    for (fqn, _), by_value in sides.items():
        if len(by_value) > 1:
            groups = sorted(by_value.values(), key=lambda group: group[0][0])
            ranks = tuple(tuple(rank for rank, _ in group) for group in groups)
            coordinates = tuple(tuple(one.coordinate for _, one in group) for group in groups)
            texts = tuple(group[0][1].text for group in groups)
            differences.append(ReplicaDifference(fqn, ranks, coordinates, values=texts if all(texts) else ()))
    return tuple(sorted(differences, key=lambda difference: (difference.fqn, difference.ranks))), uncompared


def _held(tensor: ReplicaTensor, value: bytes, across_meshes: bool) -> _Held:
    local, part = tensor.local, held_part(tensor) if across_meshes else None
    bits = as_bytes(local.cpu()).numpy().tobytes() if local.numel() == 1 and not local.is_meta else b""
    text = scalar_text(bits, local.dtype) if bits else ""
    place = (tensor.part, tuple(local.shape))
    return _Held(tensor.fqn, tensor.replica_set, place, tensor.coordinate, value, text, part)


def _located(
    scope: Scope, found: Replicas, differences: tuple[ReplicaDifference, ...]
) -> tuple[ReplicaDifference, ...]:
    """With the first differing element of some: the first differing block by its digests, then within the block."""
    named, rest = differences[:_MAX_LOCATED], differences[_MAX_LOCATED:]
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    by_fqn = {tensor.fqn: tensor.local for tensor in found.tensors}
    mine = {at: by_fqn[entry.fqn] for at, entry in enumerate(named) if any(own_rank in side for side in entry.ranks)}
    described = {at: (tuple(local.shape), local.element_size(), _block_digests(local)) for at, local in mine.items()}
    of_ranks = dict(zip(scope_ranks(scope), gather_values(described, scope), strict=True))
    blocks = [_first_difference([of_ranks[side[0]][at][2] for side in entry.ranks]) for at, entry in enumerate(named)]
    bytes_of_block = {at: _bytes_of(local, block) for at, local in mine.items() if (block := blocks[at]) is not None}
    data = dict(zip(scope_ranks(scope), gather_values(bytes_of_block, scope), strict=True))
    located = []
    for at, entry in enumerate(named):
        shape, item_bytes, _ = of_ranks[entry.ranks[0][0]][at]
        block = blocks[at]
        inside = None if block is None else _first_difference([data[side[0]][at] for side in entry.ranks])
        if block is None or inside is None:  # they were written to since they were hashed
            located.append(entry)
        else:
            byte = block * _BLOCK_BYTES + inside
            located.append(replace(entry, first_index=_index_at(byte // item_bytes, shape)))
    return (*located, *rest)


def _block_digests(local: Tensor) -> list[bytes]:
    num_blocks = -(-local.numel() * local.element_size() // _BLOCK_BYTES)
    return [hashlib.blake2b(_bytes_of(local, block), digest_size=8).digest() for block in range(num_blocks)]


def _bytes_of(local: Tensor, block: int) -> bytes:
    """Row-major bytes of one block of a tensor; only a tensor that is not contiguous is copied whole."""
    return as_bytes(local)[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES].cpu().numpy().tobytes()


def _first_difference(sides: Sequence[Sequence[Any]]) -> int | None:
    """The first position at which sequences of one length are not all equal."""
    return next((at for at, members in enumerate(zip(*sides, strict=True)) if len(set(members)) > 1), None)


def _index_at(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.insert(0, rest)
    return tuple(index)
