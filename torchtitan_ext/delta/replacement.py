"""New elements into the tensors that hold them, and the sums of what they replace. Not collective."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.delta.part_reads import Listed, ListedPart, read_listed
from torchtitan_ext.delta.saved_changes import SavedChanges, SavedPart
from torchtitan_ext.errors import DamagedCheckpointError, Problem
from torchtitan_ext.layout.dtensor import local_view, to_write
from torchtitan_ext.layout.layout import row_major_position
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.transfer.changed.changes import HeldTensor

OTHER_BITS = "has other bits than the changes were made from"

_NOTHING = Listed(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))


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


class Replacement:
    """The new elements of changes that lie in tensors, read into memory.

    Args:
        held: What part of its global tensor each of the tensors is.
        fitting: The keys whose changes are wanted.

    Attributes:
        new_sums: Per tensor the sum of the hashes of the new elements: of what is written, taken after it was read.

    Raises:
        DamagedCheckpointError: The file does not have what was written; not seen in all cases, but by ``new_sums``.
    """

    def __init__(
        self, held: Sequence[HeldTensor], tensors: Sequence[Tensor], changes: SavedChanges, fitting: Container[str]
    ) -> None:
        self._tensors = tensors
        self._shards, self._shapes = [one.shard for one in held], [one.global_shape for one in held]
        spans = [_span_of(one) if one.fqn in fitting else None for one in held]
        parts = [() if span is None else changes.parts.get(one.fqn, ()) for one, span in zip(held, spans, strict=True)]
        asked = [
            (at, ListedPart(held[at].fqn, part, *span))
            for at, span in enumerate(spans)
            if span is not None
            for part in parts[at]
            if part.box is None
        ]
        listed: list[list[Listed]] = [[] for _ in held]
        for (at, _), found in zip(asked, read_listed(changes, [one for _, one in asked]), strict=True):
            listed[at].append(found)
        own = [_within(one, _sorted(changes, one, of_tensor)) for one, of_tensor in zip(held, listed, strict=True)]
        # Per tensor: views of it, where these lie in the global tensor, and their new elements.
        self._boxes = [
            [box for part in of_tensor if part.box is not None for box in _overlaps(one, tensor, part, changes)]
            for one, tensor, of_tensor in zip(held, tensors, parts, strict=True)
        ]
        self.new_sums = [
            _core.sum_at(found.values, tensor.itemsize, found.positions)
            + sum(int(sum_box(elements, offsets, shape).item()) for _, offsets, elements in boxes)
            for shape, tensor, found, boxes in zip(self._shapes, tensors, own, self._boxes, strict=True)
        ]
        self._counts = [found.positions.size for found in own]
        offsets = ops.change_offsets([tensor.itemsize for tensor in tensors], self._counts)
        flat = np.zeros(offsets[-1], dtype=np.uint8)
        for begin, found in zip(offsets, own, strict=False):
            flat[begin : begin + found.values.size] = found.values
        device = tensors[0].device if tensors else torch.device("cpu")
        positions = np.concatenate([_NOTHING.positions, *(found.positions for found in own)])
        self._positions, self._values = torch.from_numpy(positions).to(device), torch.from_numpy(flat).to(device)

    def old_sums(self) -> list[int]:
        """Per tensor the sum of the hashes of the bits that will be replaced."""
        if not self._tensors:
            return []
        with torch.no_grad():
            tensors = [tensor.detach() for tensor in self._tensors]
            sums, found = ops.sum_elements(tensors, self._shards, self._shapes, self._positions, self._counts)
        self._num_listed = int(found.sum())
        totals: list[int] = sums.tolist()
        for at, boxes in enumerate(self._boxes):
            for part, offsets, _ in boxes:
                totals[at] += int(sum_box(part, offsets, self._shapes[at]).item())
        return totals

    def write(self) -> int:
        """Writes the new elements, after ``old_sums``; returns how many."""
        if not self._tensors:
            return 0
        with to_write(self._tensors):
            tensors = [tensor.detach() for tensor in self._tensors]
            ops.apply_changes_(tensors, self._shards, self._shapes, self._positions, self._values, self._counts)
            for boxes in self._boxes:
                for part, _, elements in boxes:
                    _as_bits(part).copy_(_as_bits(elements))
        return self._num_listed + sum(part.numel() for boxes in self._boxes for part, _, _ in boxes)


def _span_of(held: HeldTensor) -> tuple[int, int] | None:
    """The first and the last position of a tensor's elements; ``None`` without elements."""
    chunks = [chunk for chunk in held.shard.chunks if 0 not in chunk.sizes]
    if not chunks:
        return None
    first = min(row_major_position(chunk.offsets, held.global_shape) for chunk in chunks)
    ends = ([at + size - 1 for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks)
    return first, max(row_major_position(end, held.global_shape) for end in ends)


def _sorted(changes: SavedChanges, held: HeldTensor, parts: Sequence[Listed]) -> Listed:
    """The elements of parts of a tensor together, by position."""
    if not parts:
        return _NOTHING
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions, kind="stable")
    ascending = positions[order]
    if (ascending[1:] == ascending[:-1]).any():
        raise DamagedCheckpointError(f"{changes.path}: {held.fqn} has new elements of one position twice")
    values = np.concatenate([part.values for part in parts])
    return Listed(ascending, values.reshape(positions.size, -1)[order].reshape(-1))


def _within(held: HeldTensor, listed: Listed) -> Listed:
    """Those of the elements that the tensor holds."""
    if listed.positions.size == 0:
        return listed
    chunks = held.shard.chunks
    found = [_core.select_positions(listed.positions, held.global_shape, of.offsets, of.sizes)[1] for of in chunks]
    indices = np.sort(np.concatenate(found))
    return Listed(listed.positions[indices], listed.values.reshape(listed.positions.size, -1)[indices].reshape(-1))


def _overlaps(
    held: HeldTensor, tensor: Tensor, part: SavedPart, changes: SavedChanges
) -> Iterator[tuple[Tensor, tuple[int, ...], Tensor]]:
    """What a tensor of this rank has in common with a box that is given whole."""
    assert part.box is not None
    dtype = DTYPES[changes.totals[held.fqn].dtype]
    for found in _core.find_overlaps(held.shard.chunks, [part.box]):
        elements = changes.file.read_box(part.values.begin, part.box[1], dtype, found.saved_offsets, found.sizes)
        view = local_view(tensor.detach(), found.local_offsets, found.sizes)
        yield view, found.offsets, elements.to(tensor.device)


def _as_bits(tensor: Tensor) -> Tensor:
    """Bools as bytes: a copy of bools makes any bits but zero a one."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
