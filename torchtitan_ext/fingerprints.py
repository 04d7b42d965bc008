"""Fingerprints of state dicts: equal for equal bits, whatever the mesh and the layout.

The digest of a tensor is a sum, modulo 2^64, over its elements of a hash of (bits, row-major position in the global
tensor), see ``csrc/ops/element_hash.h``; dtype and global shape are mixed in. Each rank sums what it holds, and the
sums add up; of a tensor that describes its own boxes it sums each box, since other ranks may hold some of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.tables.agreement import TensorAgreement, agree
from torchtitan_ext.checkpoint.tables.key_table import (
    Box,
    BoxesEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    box_tensors,
    describe_state,
    encode_table,
)
from torchtitan_ext.errors import Problem, described, refusal
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import (
    Chunk,
    LayoutRules,
    LocalShard,
    MeshLayout,
    ShardOrder,
    ShardReport,
    Steps,
    shard_of,
)
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.ranks.exchange import check_usable, gather_values
from torchtitan_ext.state.nested import flatten_state_dict
from torchtitan_ext.state.value_digest import digest_value, fetch_sums

_BOXES = "boxes"  # in the place of a replica: of a tensor that describes its own boxes


@dataclass(frozen=True)
class Fingerprint:
    """The same on every rank.

    Attributes:
        total: Digest of the whole state, 32 hex digits.
        values: Digest of each flat key, 16 hex digits.
        differing: Keys of which not all replicas are equal; their digest is that of the first replica.
    """

    total: str
    values: dict[str, str]
    differing: tuple[str, ...]


def fingerprint(
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
) -> Fingerprint:
    """Digests a state dict over all ranks, counting one replica of each tensor.

    Equal states have equal fingerprints on every mesh and in one process. Unequal ones differ with a probability of
    about 1 - 2^-64 per tensor: this finds accidents (a lost shard, a flipped bit, exchanged rows, a replica that
    drifted), not an adversary, who can construct collisions.

    Collective over ``process_group``, which must hold every mesh of the state dict; without a process group the state
    is that of one process. Costs one pass over the tensors and two small exchanges; tensors stay on their device.

    Args:
        state_dict: Nested; DTensors, tensors that describe their own boxes, plain tensors (the lowest rank's counts)
            and other values (by ``value_digest.digest_value``).
        process_group: The ranks; the default group if left out.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Raises:
        LayoutError: The layout of a tensor is in doubt, or not all ranks of its mesh take part.
        WrongArgumentError: ``state_dict`` is something else, on some rank. A ``TypeError``.
    """
    values: dict[str, Any] = {}
    entries: dict[str, TensorEntry | BoxesEntry] = {}
    digests: dict[str, tuple[Any, Any]] = {}
    problems: list[Problem] = []
    mesh_names: dict[int, str] = {}
    check_usable("fingerprint", process_group)
    # Whatever goes wrong on this rank alone, all hear of it: each exchange takes place.
    if not isinstance(state_dict, Mapping):
        what = f"got {described(state_dict)}, expected a state dict: what state_dict() of a module or optimizer gives"
        problems.append(Problem("wrong_argument", "state_dict", what))
        state_dict = {}
    with _failures_become(problems):
        values = flatten_state_dict(state_dict).values
        entries = _entries(values, LayoutRules(layouts), problems)
    steps = _true_steps(entries, problems, process_group)
    with _failures_become(problems):
        for fqn, value in values.items():
            entry = entries.get(fqn)
            if isinstance(entry, BoxesEntry):
                digests[fqn] = (_BOXES, _box_digests(value, entry))
            elif entry is not None:
                digests[fqn] = _tensor_digest(value, entry.report, steps.get(fqn), mesh_names)
            elif not isinstance(value, Tensor):
                digests[fqn] = (None, digest_value(value).hex())
        digests = _synchronized(digests)
    gathered = gather_values((digests, problems), process_group)
    failures = [problem for _, own in gathered for problem in own]
    if failures:
        raise refusal("fingerprint", failures)
    return _combined([of_rank for of_rank, _ in gathered])


@contextmanager
def _failures_become(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(Problem("unsupported_tensor", "state_dict", f"{type(error).__name__}: {error}"))


def _entries(
    values: Mapping[str, Any], rules: LayoutRules, problems: list[Problem]
) -> dict[str, TensorEntry | BoxesEntry]:
    table = describe_state({fqn: value for fqn, value in values.items() if isinstance(value, Tensor)}, {}, rules)
    problems += table.problems
    entries: dict[str, TensorEntry | BoxesEntry] = {}
    for fqn, entry in table.entries.items():
        assert not isinstance(entry, ObjectEntry)
        value = values[fqn]
        held = box_tensors(value, entry) if isinstance(entry, BoxesEntry) else [local_tensor(value)]
        if any(local.is_meta for local in held):
            what = "is on the meta device; give it memory with to_empty() first"
            problems.append(Problem("unsupported_tensor", fqn, what))
        else:
            entries[fqn] = entry
    return entries


def _true_steps(
    entries: Mapping[str, TensorEntry | BoxesEntry], problems: list[Problem], process_group: dist.ProcessGroup | None
) -> dict[str, Steps]:
    """The sharding order of each DTensor, from what all ranks say."""
    sharded = {
        fqn: entry for fqn, entry in entries.items() if isinstance(entry, BoxesEntry) or entry.report.mesh is not None
    }
    tables = gather_values(encode_table(KeyTable(sharded, problems=tuple(problems))).message, process_group)
    agreement = agree(tables, every_rank_reports=True)
    if agreement.problems:
        raise refusal("fingerprint", agreement.problems)
    rank = dist.get_rank(process_group) if len(tables) > 1 else 0
    agreed = {fqn: agreement.keys[fqn] for fqn in sharded}
    return {
        fqn: tensor.steps[rank]
        for fqn, tensor in agreed.items()
        if isinstance(tensor, TensorAgreement) and rank in tensor.steps
    }


def _tensor_digest(
    value: Tensor, report: ShardReport, steps: Steps | None, mesh_names: dict[int, str]
) -> tuple[Any, Any]:
    """(which replica, (sum on the device, dtype, global shape)) of this rank's shard."""
    local = local_tensor(value)
    total = _sum(local, shard_of(report, steps), report.global_shape)
    replica = tuple(index for index, (dim, _) in zip(report.coordinate, report.placements, strict=True) if dim < 0)
    return (_mesh_name(report.mesh, mesh_names), report.placements, replica), (
        total,
        str(local.dtype),
        tuple(report.global_shape),
    )


def _box_digests(value: Tensor, entry: BoxesEntry) -> tuple[Any, ...]:
    """(sums on the device by box, dtype, global shape) of what this rank holds."""
    sums = {}
    for box, local in zip(entry.boxes, box_tensors(value, entry), strict=True):
        if local.numel() > 0:
            shard = LocalShard(box[1], (Chunk(*box, (0,) * len(box[1])),))
            sums[box] = _sum(local, shard, entry.global_shape)
    return sums, str(entry.dtype), entry.global_shape


def _sum(local: Tensor, shard: LocalShard, global_shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return ops.fingerprint_shard(dense_values(local).resolve_conj().resolve_neg(), shard, global_shape)


def _mesh_name(mesh: MeshLayout | None, known: dict[int, str]) -> str | None:
    """Stands for a mesh, whose list of ranks is too long to send and to compare with every tensor."""
    if mesh is not None and id(mesh) not in known:
        known[id(mesh)] = hashlib.blake2b(repr(mesh).encode(), digest_size=16).hexdigest()
    return None if mesh is None else known[id(mesh)]


def _synchronized(digests: dict[str, Any]) -> dict[str, Any]:
    """With the sums as ints: one transfer per device instead of one per tensor."""
    sums: dict[int, Tensor] = {}
    for _, digest in digests.values():
        if isinstance(digest, tuple):
            of_key = digest[0].values() if isinstance(digest[0], dict) else digest[:1]
            sums.update((id(total), total) for total in of_key)
    numbers = fetch_sums(sums)

    def read(digest: Any) -> Any:
        if not isinstance(digest, tuple):
            return digest
        held = digest[0]
        is_boxes = isinstance(held, dict)
        return {box: numbers[id(one)] for box, one in held.items()} if is_boxes else numbers[id(held)], *digest[1:]

    return {fqn: (replica, read(digest)) for fqn, (replica, digest) in digests.items()}


def _combined(gathered: list[dict[str, tuple[Any, Any]]]) -> Fingerprint:
    replicas: dict[str, dict[Any, Any]] = defaultdict(dict)
    boxes: dict[str, list[Any]] = defaultdict(list)
    for rank, digests in enumerate(gathered):
        for fqn, (replica, digest) in digests.items():
            of_key = replicas[fqn]
            if replica == _BOXES:
                boxes[fqn].append(digest)
            elif isinstance(digest, str) or replica[0] is None:  # objects and plain tensors: each rank is a replica
                of_key[rank] = digest
            elif replica in of_key:
                of_key[replica] = ((of_key[replica][0] + digest[0]), *digest[1:])
            else:
                of_key[replica] = digest
    for fqn, of_ranks in boxes.items():
        replicas[fqn].update(enumerate(_replicas_of_boxes(of_ranks)))
    values, differing = {}, []
    for fqn in sorted(replicas):
        hexes = [hex_of_digest(digest) for digest in replicas[fqn].values()]
        values[fqn] = hexes[0]
        if any(other != hexes[0] for other in hexes):
            differing.append(fqn)
    total = hashlib.blake2b(digest_size=16)
    for fqn, digest in values.items():
        total.update(f"{len(fqn)}:{fqn}={digest};".encode())
    return Fingerprint(total.hexdigest(), values, tuple(differing))


def _replicas_of_boxes(of_ranks: list[Any]) -> list[Any]:
    """Of each rank the digest of the tensor with its boxes; what it lacks is taken from the first rank that has it."""
    first: dict[Box, int] = {}
    for sums, *_ in of_ranks:
        for box, total in sums.items():
            first.setdefault(box, total)
    whole = sum(first.values())
    return [
        (whole + sum(total - first[box] for box, total in sums.items()), *described) for sums, *described in of_ranks
    ]


def hex_of_digest(digest: Any) -> str:
    """What a fingerprint has for a key: of the sum over all elements, dtype and shape of a tensor, or of a value's
    digest in hexadecimal digits."""
    if isinstance(digest, str):
        return digest[:16]
    total, dtype, shape = digest
    text = f"{total % 2**64:016x}|{dtype}|{tuple(shape)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
