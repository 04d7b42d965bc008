"""Sums over the elements of the tensors of one rank: what fingerprints consist of, and what proves a load.

``csrc/core/sums.h`` adds up and compares them over ranks and replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    ObjectEntry,
    TensorEntry,
    box_tensors,
    describe_state,
)
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor, local_view
from torchtitan_ext.layout.layout import Box, LayoutRules, LocalShard, ShardReport, Steps, shard_of
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.state.value_digest import ShardSums

_BOXES = "boxes"  # the replica of every tensor that describes its own boxes


class TensorSummer:
    """Sums tensors of one rank."""

    def __init__(self) -> None:
        # The list of a mesh's ranks is too long to send, and to compare with every tensor.
        self._mesh_names: dict[int, str] = {}
        self._sums = ShardSums[tuple[str, Box | None]]()
        self._boxes: dict[str, list[Box | None]] = {}
        self._kinds: dict[str, dict[str, Any]] = {}
        # Tensors that are held alike share a report, which keeps its id here.
        self._shards: dict[tuple[int, Steps | None], tuple[ShardReport, LocalShard]] = {}

    def add(self, fqn: str, value: Tensor, entry: TensorEntry | BoxesEntry, steps: Steps | None) -> None:
        """Adds a tensor, which is summed on its device; ``steps`` is its sharding order where it is on a mesh."""
        shape, dtype = tuple(entry.global_shape), entry.dtype
        boxes: list[Box | None] = []
        if isinstance(entry, TensorEntry):
            local = local_tensor(value)
            dtype = local.dtype
            boxes.append(None)
            self._sums.add((fqn, None), dense_values(local), self._shard_of(entry.report, steps), shape)
        else:
            for offsets, elements in held_boxes(value, entry, steps):
                boxes.append((offsets, tuple(elements.shape)))
                self._sums.add_box((fqn, boxes[-1]), elements, offsets, shape)
        self._boxes[fqn] = boxes
        self._kinds[fqn] = {"dtype": str(dtype), "shape": shape, "replica": self.replica_of(entry)}

    def table(self) -> SumTable:
        """The sums of all tensors.

        Raises:
            Exception: One of them cannot be summed: whatever the operator raises.
        """
        table, errors = self.found()
        if errors:
            raise next(iter(errors.values()))
        return table

    def found(self) -> tuple[SumTable, dict[str, Exception]]:
        """The sums; and why others cannot be summed, such as those of a dtype that the operator does not know."""
        table = SumTable()
        numbers, of_boxes = self._sums.found()
        errors = {fqn: error for (fqn, _), error in of_boxes.items()}
        for fqn, boxes in self._boxes.items():
            if fqn not in errors:
                table.add_key(fqn, {box: numbers[fqn, box] for box in boxes}, **self._kinds[fqn])
        return table, errors

    def _shard_of(self, report: ShardReport, steps: Steps | None) -> LocalShard:
        alike = id(report), steps
        if alike not in self._shards:
            self._shards[alike] = report, shard_of(report, steps)
        return self._shards[alike][1]

    def replica_of(self, entry: TensorEntry | BoxesEntry) -> str:
        """Equal on all ranks that hold parts of one replica; empty for a plain tensor."""
        if isinstance(entry, BoxesEntry):
            return _BOXES
        report = entry.report
        mesh = report.mesh
        if mesh is None:
            return ""
        if id(mesh) not in self._mesh_names:
            self._mesh_names[id(mesh)] = hashlib.blake2b(repr(mesh).encode(), digest_size=16).hexdigest()
        place = tuple(index for index, (dim, _) in zip(report.coordinate, report.placements, strict=True) if dim < 0)
        return f"{self._mesh_names[id(mesh)]} {report.placements} {place}"


def held_boxes(
    value: Tensor, entry: TensorEntry | BoxesEntry, steps: Steps | None
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """What a rank holds of one tensor: the offsets of each box with elements, and these, dense."""
    if isinstance(entry, TensorEntry):
        local = dense_values(local_tensor(value))
        for chunk in shard_of(entry.report, steps).chunks:
            yield chunk.offsets, local_view(local, chunk.local_offsets, chunk.sizes)
        return
    for (offsets, _), local in zip(entry.boxes, box_tensors(value, entry), strict=True):
        if local.numel() > 0:
            yield offsets, dense_values(local)


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


def hex_of_digest(total: int, dtype: str, shape: tuple[int, ...]) -> str:
    """The digest of a tensor in a fingerprint, from the sum over all its elements modulo 2^64."""
    return hashlib.blake2b(f"{total:016x}|{dtype}|{tuple(shape)}".encode(), digest_size=8).hexdigest()
