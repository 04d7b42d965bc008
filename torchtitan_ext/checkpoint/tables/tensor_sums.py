"""Sums over the elements of tensors, of each rank and of each replica: what fingerprints consist of, and what proves a
load.

The sum of a box is that of a hash of (bits, row-major position in the global tensor) over its elements, modulo 2^64
(``csrc/core/element_hash.h``). Each rank sums what it holds; the sums of a replica add up. A rank sums each box apart
where the tensor describes its own boxes: other ranks may hold some of them too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.tables.key_table import (
    Box,
    BoxesEntry,
    ObjectEntry,
    TensorEntry,
    box_tensors,
    describe_state,
)
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor, local_view
from torchtitan_ext.layout.layout import LayoutRules, LocalShard, Steps, shard_of
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.state.value_digest import fetch_sums, sum_box

_BOXES = "boxes"  # the replica of every tensor that describes its own boxes


class TensorSums(NamedTuple):
    """The sum over each box that a rank holds of a tensor, first on the device, then as a number.

    A shard counts as one box, ``None``. ``replica`` is equal on all ranks that hold parts of one replica, and ``None``
    for a plain tensor.
    """

    replica: Any
    sums: Mapping[Box | None, Any]
    dtype: str
    shape: tuple[int, ...]


class ReplicaTotal(NamedTuple):
    """The sum over a whole replica of a tensor, not reduced modulo 2^64, and the ranks that hold it."""

    ranks: tuple[int, ...]
    total: int
    dtype: str
    shape: tuple[int, ...]


class HeldBox(NamedTuple):
    """A box of a global tensor that a rank holds, and its elements, dense."""

    replica: Any
    offsets: tuple[int, ...]
    elements: Tensor


class TensorSummer:
    """Sums tensors of one rank."""

    def __init__(self) -> None:
        # The list of a mesh's ranks is too long to send, and to compare with every tensor.
        self._mesh_names: dict[int, str] = {}

    def sum(self, value: Tensor, entry: TensorEntry | BoxesEntry, steps: Steps | None) -> TensorSums:
        """The sums of one tensor, on its device; ``steps`` is its sharding order where it is on a mesh."""
        if isinstance(entry, TensorEntry):
            shard = shard_of(entry.report, steps)
            total = _sum(dense_values(local_tensor(value)), shard, entry.global_shape)
            replica = self.replica_of(entry)
            return TensorSums(replica, {None: total}, str(local_tensor(value).dtype), tuple(entry.global_shape))
        sums: dict[Box | None, Tensor] = {}
        for box, local in zip(entry.boxes, box_tensors(value, entry), strict=True):
            if local.numel() > 0:
                sums[box] = sum_box(dense_values(local), box[0], entry.global_shape)
        return TensorSums(_BOXES, sums, str(entry.dtype), entry.global_shape)

    def held_boxes(self, value: Tensor, entry: TensorEntry | BoxesEntry, steps: Steps | None) -> Iterator[HeldBox]:
        """What the rank holds of one tensor, box by box; boxes without elements are left out."""
        if isinstance(entry, TensorEntry):
            local, replica = dense_values(local_tensor(value)), self.replica_of(entry)
            for chunk in shard_of(entry.report, steps).chunks:
                yield HeldBox(replica, chunk.offsets, local_view(local, chunk.local_offsets, chunk.sizes))
            return
        for box, local in zip(entry.boxes, box_tensors(value, entry), strict=True):
            if local.numel() > 0:
                yield HeldBox(_BOXES, box[0], dense_values(local))

    def replica_of(self, entry: TensorEntry | BoxesEntry) -> Any:
        """The ``replica`` of ``TensorSums``."""
        if isinstance(entry, BoxesEntry):
            return _BOXES
        report = entry.report
        mesh = report.mesh
        if mesh is None:
            return None
        if id(mesh) not in self._mesh_names:
            self._mesh_names[id(mesh)] = hashlib.blake2b(repr(mesh).encode(), digest_size=16).hexdigest()
        place = tuple(index for index, (dim, _) in zip(report.coordinate, report.placements, strict=True) if dim < 0)
        return self._mesh_names[id(mesh)], report.placements, place


def describe_tensors(
    values: Mapping[str, Any], rules: LayoutRules
) -> tuple[dict[str, TensorEntry | BoxesEntry], list[Problem]]:
    """The entries of the tensors in a flat state dict, and why others cannot be summed."""
    table = describe_state({fqn: value for fqn, value in values.items() if isinstance(value, Tensor)}, {}, rules)
    problems = list(table.problems)
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
    return entries, problems


def with_numbers(sums: Mapping[str, TensorSums]) -> dict[str, TensorSums]:
    """Fetches the sums from their devices: one transfer per device instead of one per tensor."""
    numbers = fetch_sums({id(total): total for of_key in sums.values() for total in of_key.sums.values()})
    return {
        fqn: of_key._replace(sums={box: numbers[id(total)] for box, total in of_key.sums.items()})
        for fqn, of_key in sums.items()
    }


def totals_of_replicas(parts: Iterable[tuple[int, TensorSums]]) -> list[ReplicaTotal]:
    """The sum of each replica of a tensor: of each rank's plain tensor, of each whole sharded tensor.

    Args:
        parts: Of each rank that holds a part, in the order of ranks.
    """
    replicas: dict[Any, list[tuple[int, TensorSums]]] = defaultdict(list)
    for rank, part in parts:
        replicas[rank if part.replica is None else part.replica].append((rank, part))
    totals = []
    for replica, members in replicas.items():
        _, (_, _, dtype, shape) = members[0]
        if replica != _BOXES:
            ranks = tuple(rank for rank, _ in members)
            totals.append(ReplicaTotal(ranks, sum(part.sums[None] for _, part in members), dtype, shape))
            continue
        # Each rank's replica has the boxes that it lacks from the first rank that holds them.
        first: dict[Any, int] = {}
        for _, part in reversed(members):
            first.update(part.sums)
        whole = sum(first.values())
        for rank, part in members:
            total = whole + sum(of_box - first[box] for box, of_box in part.sums.items())
            totals.append(ReplicaTotal((rank,), total, dtype, shape))
    return totals


def _sum(dense: Tensor, shard: LocalShard, global_shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return ops.fingerprint_shard(dense.resolve_conj().resolve_neg(), shard, global_shape)


def hex_of_digest(total: int, dtype: str, shape: tuple[int, ...]) -> str:
    """The digest of a tensor in a fingerprint, from the sum over all its elements."""
    text = f"{total % 2**64:016x}|{dtype}|{tuple(shape)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
