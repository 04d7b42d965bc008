"""New elements into the tensors that hold them, and the sums of what they replace. Not collective."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.delta.saved_changes import SavedChanges, SavedPart, TensorTotals
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_view, to_write
from torchtitan_ext.layout.layout import LocalShard, row_major_position
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.transfer.changes import HeldTensor

OTHER_BITS = "has other bits than the changes were made from"


def why_unfit(
    changes: SavedChanges,
    kinds: Mapping[str, Collection[tuple[str, tuple[int, ...]]]],
    *,
    left_out: Container[str],
    nowhere: str,
) -> list[Problem]:
    """Why tensors cannot take the changes, by their names.

    Args:
        kinds: Dtype and shape of each tensor.
        left_out: Changed tensors that are not asked for.
        nowhere: The end of a sentence about a tensor that is missing.
    """
    problems = []
    for fqn in changes.changed_keys:
        total = changes.totals[fqn]
        if fqn not in kinds and fqn not in left_out:
            problems.append(Problem("missing_key", fqn, f"has changed, and {nowhere}"))
        for dtype, shape in sorted(kinds.get(fqn, ())):
            if shape != total.shape:
                what = f"has shape {total.shape} in the changes, {shape} in the state"
                problems.append(Problem("wrong_shape", fqn, what))
            elif dtype != total.dtype:
                problems.append(Problem("wrong_dtype", fqn, f"is {total.dtype} in the changes, {dtype} in the state"))
    return problems


@dataclass
class Replacement:
    """Tensors, and the new elements of each, in order: those of the changes that lie in it."""

    held: Sequence[HeldTensor]
    tensors: Sequence[Tensor]
    positions: Tensor
    values: Tensor
    counts: Sequence[int]
    boxes: Sequence[Sequence[tuple[Tensor, tuple[int, ...], Tensor]]]
    """Per tensor: a view of it, where that lies in the global tensor, and its new elements."""

    @staticmethod
    def of(
        held: Sequence[HeldTensor],
        tensors: Sequence[Tensor],
        changes: SavedChanges,
        fitting: Mapping[str, TensorTotals],
    ) -> Replacement:
        counts, positions, values = [], [], []
        boxes: list[list[tuple[Tensor, tuple[int, ...], Tensor]]] = []
        for one, tensor in zip(held, tensors, strict=True):
            span = _span_of(one)
            parts = changes.parts[one.fqn] if one.fqn in fitting and span is not None else ()
            parts = [part if span is None else part.within(*span) for part in parts]
            own_positions, own_values = _sorted_elements([part for part in parts if part.box is None], tensor.itemsize)
            counts.append(own_positions.size)
            positions.append(own_positions)
            values.append(own_values)
            whole = [part for part in parts if part.box is not None]
            boxes.append([box for part in whole for box in _overlaps(one, tensor, part, fitting[one.fqn])])
        offsets = ops.change_offsets([tensor.itemsize for tensor in tensors], counts)
        flat = np.zeros(offsets[-1], dtype=np.uint8)
        for begin, own_values in zip(offsets, values, strict=False):
            flat[begin : begin + own_values.size] = own_values
        device = tensors[0].device if tensors else torch.device("cpu")
        all_positions = np.concatenate([np.empty(0, dtype=np.int64), *positions])
        return Replacement(
            held, tensors, torch.from_numpy(all_positions).to(device), torch.from_numpy(flat).to(device), counts, boxes
        )

    def old_sums(self) -> list[int]:
        """Per tensor the sum of the hashes of the bits that will be replaced."""
        if not self.tensors:
            return []
        with torch.no_grad():
            sums, found = ops.sum_elements(self._locals(), self._shards(), self._shapes(), self.positions, self.counts)
        self._found: list[int] = found.tolist()
        totals: list[int] = sums.tolist()
        for at, boxes in enumerate(self.boxes):
            for part, offsets, _ in boxes:
                totals[at] += int(sum_box(part, offsets, self.held[at].global_shape).item())
        return totals

    def write(self) -> int:
        """Writes the new elements; returns how many."""
        if not self.tensors:
            return 0
        with to_write(self.tensors):
            ops.apply_changes_(self._locals(), self._shards(), self._shapes(), self.positions, self.values, self.counts)
            for boxes in self.boxes:
                for part, _, elements in boxes:
                    _as_bits(part).copy_(_as_bits(elements))
        return sum(self._found) + sum(part.numel() for boxes in self.boxes for part, _, _ in boxes)

    def _locals(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self.tensors]

    def _shards(self) -> list[LocalShard]:
        return [held.shard for held in self.held]

    def _shapes(self) -> list[tuple[int, ...]]:
        return [held.global_shape for held in self.held]


def _span_of(held: HeldTensor) -> tuple[int, int] | None:
    """The first and the last position of a tensor's elements; ``None`` without elements."""
    chunks = [chunk for chunk in held.shard.chunks if 0 not in chunk.sizes]
    if not chunks:
        return None
    first = min(row_major_position(chunk.offsets, held.global_shape) for chunk in chunks)
    ends = ([at + size - 1 for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks)
    return first, max(row_major_position(end, held.global_shape) for end in ends)


def _sorted_elements(parts: Sequence[SavedPart], item_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and elements of parts together, by position; each position once, since parts are disjoint."""
    if not parts:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8)
    if len(parts) == 1:
        return parts[0].positions(), parts[0].values
    positions = np.concatenate([part.positions() for part in parts])
    values = np.concatenate([part.values for part in parts]).reshape(-1, item_bytes)
    order = np.argsort(positions, kind="stable")
    return positions[order], values[order].reshape(-1)


def _overlaps(
    held: HeldTensor, tensor: Tensor, part: SavedPart, total: TensorTotals
) -> list[tuple[Tensor, tuple[int, ...], Tensor]]:
    """What a tensor of this rank has in common with a box that is given whole."""
    assert part.box is not None
    found = []
    for chunk in held.shard.chunks:
        begins = [max(a, b) for a, b in zip(chunk.offsets, part.box[0], strict=True)]
        ends = [
            min(a + size, b + other)
            for a, size, b, other in zip(chunk.offsets, chunk.sizes, part.box[0], part.box[1], strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if all(size > 0 for size in sizes):
            in_local = tuple(
                at + local - first for at, local, first in zip(begins, chunk.local_offsets, chunk.offsets, strict=True)
            )
            in_box = tuple(at - first for at, first in zip(begins, part.box[0], strict=True))
            target = local_view(tensor.detach(), in_local, sizes)
            given = part.values.reshape(*part.box[1], tensor.itemsize)
            own = given[tuple(slice(at, at + size) for at, size in zip(in_box, sizes, strict=True))]
            elements = torch.from_numpy(own.copy()).view(-1).view(DTYPES[total.dtype]).view(sizes)
            found.append((target, tuple(begins), elements.to(tensor.device)))
    return found


def _as_bits(tensor: Tensor) -> Tensor:
    """Bools as bytes: a copy of bools makes any bits but zero a one."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
