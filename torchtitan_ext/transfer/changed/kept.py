"""What is kept of an earlier version of tensors of one rank, and what it finds in later versions of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import as_bytes, local_view
from torchtitan_ext.state.value_digest import ShardSums, sum_shard
from torchtitan_ext.transfer.changed.changes import Changes, HeldTensor

_OFFSET_BYTES = 2  # of a position inside its block
_BLOCK_ELEMENTS = 65536


@dataclass
class Found:
    """What differs in the tensors of a rank; see ``Changes``. The sums are those of the elements that differ."""

    counts: list[int]
    positions: Tensor
    values: Tensor
    whole: dict[int, Tensor]
    old_sums: list[int]
    new_sums: list[int]


class KeptValues:
    """Copies of the tensors in host memory, pinned where there is an accelerator."""

    def __init__(self, tensors: Sequence[Tensor], held: Sequence[HeldTensor]) -> None:
        self._held = held
        self.base: list[Tensor] = [
            _host_copy(tensor, pin_memory=torch.accelerator.is_available()) for tensor in tensors
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.base)

    def find(self, new: list[Tensor]) -> Found:
        """Reads both versions once."""
        return _joined([self._find(new, batch) for batch in _batches(new)], [tensor.itemsize for tensor in new])

    def advance(self, changes: Changes | Found) -> None:
        shards, shapes = [held.shard for held in self._held], [held.global_shape for held in self._held]
        with torch.no_grad():
            ops.apply_changes_(self.base, shards, shapes, changes.positions, changes.values, changes.counts)
            for tensor, values in changes.whole.items():
                as_bytes(self.base[tensor]).copy_(as_bytes(values))
        kept = self.base
        self.base = list(kept)
        kept.clear()  # changes that were found before have it: it is not their base any more

    def _find(self, all_new: list[Tensor], batch: range) -> Found:
        """In the tensors at some positions, where they lie: the copies come there."""
        new, held = [all_new[at] for at in batch], [self._held[at] for at in batch]
        base = [self.base[at].to(all_new[at].device, non_blocking=True) for at in batch]
        found = find_between(new, base, held)
        return replace(found, whole={batch[at]: values for at, values in found.whole.items()})


def find_between(all_new: Sequence[Tensor], base: Sequence[Tensor], held: Sequence[HeldTensor]) -> Found:
    """What differs between two versions of tensors on one device."""
    new = [tensor.detach() for tensor in all_new]
    shards, shapes = [one.shard for one in held], [one.global_shape for one in held]
    limits = [_most_listed(tensor) for tensor in new]
    with torch.no_grad():
        positions, values, num_changed, sums = ops.find_changes(new, base, shards, shapes, limits)
    counts, (old_sums, new_sums) = num_changed.tolist(), sums.tolist()
    are_whole = [count > limit for count, limit in zip(counts, limits, strict=True)]
    counts = [0 if is_whole else count for count, is_whole in zip(counts, are_whole, strict=True)]
    whole = {}
    for at, is_whole in enumerate(are_whole):
        if is_whole:
            whole[at] = _host_copy(new[at])
            old_sums[at], new_sums[at] = (int(sum_shard(of[at], shards[at], shapes[at])) for of in (base, new))
    return Found(counts, positions.cpu(), values.cpu(), whole, old_sums, new_sums)


class KeptHashes:
    """Sums of the hashes of blocks of the tensors: a block in which anything changed counts as changed altogether.

    A block is a number of rows of one chunk, of 65,536 elements or a little more.
    """

    def __init__(self, tensors: Sequence[Tensor], held: Sequence[HeldTensor]) -> None:
        self.base: list[Tensor] = []
        self._held = held
        self._sums = self._sums_of(tensors)
        self._new_sums = self._sums

    @property
    def num_bytes(self) -> int:
        return 8 * sum(map(len, self._sums))

    def find(self, new: list[Tensor]) -> Found:
        """Reads the later version once, and what changed twice."""
        self._new_sums = self._sums_of(new)
        found = []
        for at, (tensor, held) in enumerate(zip(new, self._held, strict=True)):
            before, after = self._sums[at], self._new_sums[at]
            are_changed = list(map(operator.ne, before, after))
            blocks = list(compress(_blocks(tensor, held), are_changed))
            count = sum(elements.numel() for _, elements in blocks)
            if count > _most_listed(tensor):
                whole = {at: _host_copy(tensor)}
                found.append(Found([0], _NO_POSITIONS, _NO_VALUES, whole, [sum(before)], [sum(after)]))
                continue
            old_sum, new_sum = (sum(compress(sums, are_changed)) for sums in (before, after))
            positions = [positions_of(offsets, elements.shape, held.global_shape) for offsets, elements in blocks]
            values = [as_bytes(elements.cpu()) for _, elements in blocks]
            all_positions, all_values = torch.cat([_NO_POSITIONS, *positions]), torch.cat([_NO_VALUES, *values])
            # The blocks of one chunk may begin before those of the chunk before it end.
            order = all_positions.argsort()
            items = all_values.view(-1, tensor.itemsize)[order].view(-1)
            found.append(Found([count], all_positions[order], items, {}, [old_sum], [new_sum]))
        return _joined(found, [tensor.itemsize for tensor in new])

    def advance(self, changes: Changes) -> None:
        self._sums = self._new_sums

    def _sums_of(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Per tensor those of its blocks."""
        sums = ShardSums[tuple[int, int]]()
        for at, (tensor, held) in enumerate(zip(tensors, self._held, strict=True)):
            for number, (offsets, elements) in enumerate(_blocks(tensor, held)):
                sums.add_box((at, number), elements, offsets, held.global_shape)
        of_tensors: list[list[int]] = [[] for _ in tensors]
        for (at, _), total in sums.numbers().items():
            of_tensors[at].append(total)
        return of_tensors


_NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")
_NO_VALUES = torch.empty(0, dtype=torch.uint8, device="cpu")


def _blocks(tensor: Tensor, held: HeldTensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Where each block of a tensor begins in the global tensor, and its elements."""
    for chunk in held.shard.chunks:
        elements = local_view(tensor.detach(), chunk.local_offsets, chunk.sizes)
        if not chunk.sizes:
            yield (), elements
            continue
        num_rows = max(1, _BLOCK_ELEMENTS // max(1, elements.numel() // chunk.sizes[0]))
        for first, rows in zip(range(0, chunk.sizes[0], num_rows), elements.split(num_rows), strict=True):
            yield (chunk.offsets[0] + first, *chunk.offsets[1:]), rows


def positions_of(offsets: Sequence[int], sizes: Sequence[int], global_shape: Sequence[int]) -> Tensor:
    """The positions of a box of a global tensor, 1-d."""
    positions = torch.zeros((), dtype=torch.int64, device="cpu")
    stride = 1
    for dim in reversed(range(len(global_shape))):
        of_dim = (torch.arange(sizes[dim], dtype=torch.int64, device="cpu") + offsets[dim]) * stride
        positions = of_dim.view(-1, *[1] * positions.dim()) + positions
        stride *= global_shape[dim]
    return positions.reshape(-1)


def _most_listed(tensor: Tensor) -> int:
    """The most changes of a tensor that take fewer bytes than all of it."""
    return max(0, tensor.numel() * tensor.itemsize - 1) // (tensor.itemsize + _OFFSET_BYTES)


def _host_copy(tensor: Tensor, *, pin_memory: bool = False) -> Tensor:
    """A contiguous copy in host memory, of the same bits."""
    bits = tensor.detach()
    bits = bits.view(torch.uint8) if bits.dtype == torch.bool else bits  # a copy of bools makes any bits but zero a one
    with torch.inference_mode(False), torch.no_grad():  # it is written again outside of inference mode
        copy = torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=pin_memory)
        return copy.copy_(bits).view(tensor.dtype)


def _joined(parts: Sequence[Found], item_bytes: Sequence[int]) -> Found:
    """What was found in consecutive tensors."""
    if len(parts) == 1:
        return parts[0]
    counts = [count for part in parts for count in part.counts]
    offsets = ops.change_offsets(item_bytes, counts)
    values = torch.empty(offsets[-1], dtype=torch.uint8, device="cpu")
    first = 0
    for part in parts:
        values[offsets[first] : offsets[first] + part.values.numel()] = part.values
        first += len(part.counts)
    return Found(
        counts=counts,
        positions=torch.cat([_NO_POSITIONS, *(part.positions for part in parts)]),
        values=values,
        whole={tensor: values for part in parts for tensor, values in part.whole.items()},
        old_sums=[total for part in parts for total in part.old_sums],
        new_sums=[total for part in parts for total in part.new_sums],
    )


def _batches(tensors: list[Tensor]) -> Iterator[range]:
    """Ranges of tensors that are compared at once: all in host memory; elsewhere the copies come there in parts."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        yield range(len(tensors))
        return
    first = num_bytes = 0
    for at, tensor in enumerate(tensors):
        if at > first and num_bytes + tensor.numel() * tensor.itemsize > ops.DEFAULT_BUCKET_BYTES:
            yield range(first, at)
            first, num_bytes = at, 0
        num_bytes += tensor.numel() * tensor.itemsize
    yield range(first, len(tensors))
