"""Fingerprints of state dicts: equal for equal bits, whatever the mesh and the layout.

The digest of a tensor is a sum, modulo 2^64, over its elements of a hash of (bits, row-major position in the global
tensor), see ``csrc/core/element_hash.h``; dtype and global shape are mixed in. Each rank sums what it holds, and the
sums of all ranks add up. A rank sums each box apart where the tensor describes its own boxes: other ranks may hold
some of them too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.tables.agreement import agree
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
from torchtitan_ext.layout.layout import Chunk, LayoutRules, LocalShard, ShardOrder, ShardReport, Steps, shard_of
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.ranks.exchange import check_usable, gather_values
from torchtitan_ext.state.nested import flatten_state_dict
from torchtitan_ext.state.value_digest import digest_value, fetch_sums

_BOXES = "boxes"  # the replica of every tensor that describes its own boxes


@dataclass(frozen=True)
class Fingerprint:
    """The same on every rank.

    Attributes:
        total: Digest of the whole state, 32 hex digits.
        values: Digest of each flat key, 16 hex digits.
        differing: Keys whose replicas are not all equal; their digest is that of the first replica.
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
    digests: dict[str, _TensorSums | str] = {}
    problems: list[Problem] = []
    mesh_names: dict[int, str] = {}
    check_usable("fingerprint", process_group)
    # A failure on this rank alone becomes a problem, so that each exchange takes place and every rank gets it.
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
                digests[fqn] = _sum_boxes(value, entry)
            elif entry is not None:
                digests[fqn] = _sum_shard(value, entry.report, steps.get(fqn), mesh_names)
            elif not isinstance(value, Tensor):
                digests[fqn] = digest_value(value).hex()[:16]
        digests = _with_numbers(digests)
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
    """The sharding order of each DTensor, decided from the reports of all ranks."""
    sharded = {
        fqn: entry for fqn, entry in entries.items() if isinstance(entry, BoxesEntry) or entry.report.mesh is not None
    }
    tables = gather_values(encode_table(KeyTable(sharded, problems=tuple(problems))).message, process_group)
    agreement = agree(tables, every_rank_reports=True)
    if agreement.problems:
        raise refusal("fingerprint", agreement.problems)
    rank = dist.get_rank(process_group) if len(tables) > 1 else 0
    return agreement.world.steps_of(rank)


class _TensorSums(NamedTuple):
    """The sum over each box that a rank holds of a tensor, first on the device, then as a number.

    A shard counts as one box, ``None``. ``replica`` is equal on all ranks that hold parts of one replica, and ``None``
    for a plain tensor.
    """

    replica: Any
    sums: Mapping[Box | None, Any]
    dtype: str
    shape: tuple[int, ...]


def _sum_shard(value: Tensor, report: ShardReport, steps: Steps | None, mesh_names: dict[int, str]) -> _TensorSums:
    local, mesh, replica = local_tensor(value), report.mesh, None
    if mesh is not None:
        if id(mesh) not in mesh_names:  # the list of ranks is too long to send and to compare with every tensor
            mesh_names[id(mesh)] = hashlib.blake2b(repr(mesh).encode(), digest_size=16).hexdigest()
        place = tuple(index for index, (dim, _) in zip(report.coordinate, report.placements, strict=True) if dim < 0)
        replica = (mesh_names[id(mesh)], report.placements, place)
    total = _sum(local, shard_of(report, steps), report.global_shape)
    return _TensorSums(replica, {None: total}, str(local.dtype), tuple(report.global_shape))


def _sum_boxes(value: Tensor, entry: BoxesEntry) -> _TensorSums:
    sums: dict[Box | None, Tensor] = {}
    for box, local in zip(entry.boxes, box_tensors(value, entry), strict=True):
        if local.numel() > 0:
            shard = LocalShard(box[1], (Chunk(*box, (0,) * len(box[1])),))
            sums[box] = _sum(local, shard, entry.global_shape)
    return _TensorSums(_BOXES, sums, str(entry.dtype), entry.global_shape)


def _sum(local: Tensor, shard: LocalShard, global_shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return ops.fingerprint_shard(dense_values(local).resolve_conj().resolve_neg(), shard, global_shape)


def _with_numbers(digests: dict[str, _TensorSums | str]) -> dict[str, _TensorSums | str]:
    """Fetches the sums from their devices: one transfer per device instead of one per tensor."""
    tensors = {fqn: digest for fqn, digest in digests.items() if isinstance(digest, _TensorSums)}
    numbers = fetch_sums({id(total): total for digest in tensors.values() for total in digest.sums.values()})
    fetched = {
        fqn: digest._replace(sums={box: numbers[id(total)] for box, total in digest.sums.items()})
        for fqn, digest in tensors.items()
    }
    return {**digests, **fetched}


def _combined(gathered: list[dict[str, _TensorSums | str]]) -> Fingerprint:
    of_key: dict[str, list[_TensorSums | str]] = defaultdict(list)
    for of_rank in gathered:
        for fqn, digest in of_rank.items():
            of_key[fqn].append(digest)
    values, differing = {}, []
    total = hashlib.blake2b(digest_size=16)
    for fqn in sorted(of_key):
        of_replicas = _digests_of_replicas(of_key[fqn])
        values[fqn] = of_replicas[0]
        if any(digest != of_replicas[0] for digest in of_replicas):
            differing.append(fqn)
        total.update(f"{len(fqn)}:{fqn}={of_replicas[0]};".encode())
    return Fingerprint(total.hexdigest(), values, tuple(differing))


def _digests_of_replicas(of_ranks: list[_TensorSums | str]) -> list[str]:
    """The digest of each replica of a value: of each rank's object or plain tensor, of each whole sharded tensor."""
    digests = [digest for digest in of_ranks if isinstance(digest, str)]
    replicas: dict[Any, list[_TensorSums]] = defaultdict(list)
    for rank, part in enumerate(of_ranks):
        if not isinstance(part, str):
            replicas[rank if part.replica is None else part.replica].append(part)
    for replica, parts in replicas.items():
        if replica == _BOXES:
            # Each rank's replica has the boxes that it lacks from the first rank that holds them.
            first: dict[Any, int] = {}
            for part in reversed(parts):
                first.update(part.sums)
            whole = sum(first.values())
            totals = [whole + sum(total - first[box] for box, total in part.sums.items()) for part in parts]
        else:
            totals = [sum(part.sums[None] for part in parts)]
        digests += [hex_of_digest(total, parts[0].dtype, parts[0].shape) for total in totals]
    return digests


def hex_of_digest(total: int, dtype: str, shape: tuple[int, ...]) -> str:
    """The digest of a tensor in a fingerprint, from the sum over all its elements."""
    text = f"{total % 2**64:016x}|{dtype}|{tuple(shape)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
