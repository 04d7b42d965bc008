"""Fills boxes of mapped tensors: reads the runs of the sources they need, straight into place where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError
from torchtitan_ext.layout.dtensor import is_wrapper, local_view
from torchtitan_ext.state.host_copies import aligned
from torchtitan_ext.storage.native.read_batch import Copy, OpenFiles, RecordFiles, add_box, is_plain_target
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.transforms.mapped import MappedMetadata

_NOT_PLAIN = "it is a tensor subclass, quantised or sparse: a transform takes plain tensors; load it without"

# Elements that cannot be read into place (turned, cast, scaled, of an accelerator) pass through buffers of this size.
_BUFFER_BYTES = 8 << 20

# Runs shorter than this are read in the order of the file and put in place by torch, which turns tensors in blocks.
_MIN_RUN_BYTES = 64


class _Buffer:
    """Memory for boxes, which is used again and again.

    Attributes:
        used: The bytes that are taken.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self.used = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much can be taken beside what is; an empty buffer takes anything."""
        return self.used == 0 or self.used + num_bytes <= _BUFFER_BYTES

    def take(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room for a box; memory of its own where there is not enough."""
        begin, num_bytes = self.used, torch.Size(sizes).numel() * dtype.itemsize
        self.used = aligned(begin + num_bytes)
        if begin + num_bytes > _BUFFER_BYTES:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        if self._memory is None:
            self._memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        return self._memory[begin : begin + num_bytes].view(dtype).view(sizes)


class MappedReads:
    """Boxes of targets that are read together: ``add`` boxes, then ``read``.

    Attributes:
        num_bytes: What the next ``read`` reads, in bytes.
        num_bytes_read: What was read so far.
    """

    def __init__(self, mapped: MappedMetadata, files: RecordFiles) -> None:
        self._mapped = mapped
        self._source = files
        self._files = OpenFiles(files)
        self._copies: list[Copy] = []
        self._results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.dtype]]] = []
        self._casting = _Buffer()
        self._turning = _Buffer()
        self._is_adding = False
        self.num_bytes = 0
        self.num_bytes_read = 0

    def add(self, fqn: str, offsets: Sequence[int], target: torch.Tensor) -> None:
        """Adds the box of a tensor at some offsets, of the sizes of ``target``, which ``read`` fills.

        Where a buffer is full, what was added before is read now.

        Raises:
            CheckpointReadError: A source is no plain memory.
            DamagedCheckpointError: Bytes are not what was written.
            OSError: A file cannot be read.
        """
        dtypes, scale_dtype = self._mapped.dtypes(fqn), self._mapped.scale_dtype(fqn)
        begin = tuple(offsets)
        if 0 in target.shape:
            return
        if scale_dtype is None and len(dtypes) == 1 and is_plain_target(target, dtypes[0]):
            self._add_parts(fqn, begin, target)
            return
        item_bytes = max(dtype.itemsize for dtype in dtypes) + (0 if scale_dtype is None else scale_dtype.itemsize + 8)
        max_elements = target.numel() if is_wrapper(target) else max(1, _BUFFER_BYTES // item_bytes)
        for inside, sizes in _core.BoxParts((0,) * target.dim(), target.shape, max_elements):
            if not self._casting.has_room(torch.Size(sizes).numel() * item_bytes):
                self.read()
            self._is_adding = True
            place = self._casting.take(sizes, dtypes[0])
            at = tuple(map(add, begin, inside))
            self._add_parts(fqn, at, place)
            scale = None
            if scale_dtype is not None:
                scale = self._casting.take(sizes, scale_dtype)
                self._add_parts(fqn, at, scale, scales=True)
            self._is_adding = False
            whole = target if sizes == tuple(target.shape) else local_view(target, inside, sizes)
            self._results.append((whole, place, scale, dtypes[1:]))

    def read(self) -> None:
        """Fills all boxes that were added."""
        try:
            self._files.read()
        except BaseException:
            self._is_adding = False
            self._forget()
            raise
        with torch.no_grad():
            for place, values in self._copies:
                place.copy_(values)
            for target, values, scales, dtypes in self._results:
                target.copy_(_converted(values, scales, dtypes, target.dtype))
        self.num_bytes_read += self.num_bytes
        self._forget()

    def _add_parts(self, fqn: str, offsets: tuple[int, ...], place: torch.Tensor, *, scales: bool = False) -> None:
        parts = self._mapped.parts(fqn, offsets, tuple(place.shape), place.stride(), scales=scales)
        chunks = [self._mapped.chunk_of(part) for part in parts]
        records = self._source.find_records([index for index, _ in chunks])
        for part, (index, sizes), record in zip(parts, chunks, records, strict=True):
            if record.tensor is None:
                raise CheckpointReadError(index.fqn, _NOT_PLAIN)
            if DTYPES[record.tensor.dtype] != place.dtype or record.tensor.sizes != sizes:
                raise DamagedCheckpointError(f"{record.file}: {index.fqn} is not of the dtype and shape in .metadata")
            self._add_part(part, record.file, part.stored(record.tensor), place)

    def _add_part(self, part: _core.MapPart, name: str, stored: _core.StoredTensor, place: torch.Tensor) -> None:
        strides = part.memory_strides
        view = place.as_strided(stored.sizes, strides, place.storage_offset() + part.memory_offset)
        file = self._files.number_of(name, self.read)
        self.num_bytes += view.numel() * stored.item_bytes
        if _has_long_runs(stored, strides):
            self._copies += add_box(self._files.runs, file, stored, (0,) * view.dim(), view)
            return
        # Repeated elements (stride 0) are read once.
        once = [dim for dim, stride in enumerate(stored.strides) if stride == 0]
        sizes = tuple(1 if dim in once else size for dim, size in enumerate(stored.sizes))
        for inside, part_sizes in _core.BoxParts((0,) * len(sizes), sizes, _BUFFER_BYTES // stored.item_bytes):
            if not self._turning.has_room(torch.Size(part_sizes).numel() * stored.item_bytes):
                self.read()
            values = self._turning.take(part_sizes, place.dtype)
            copies = add_box(self._files.runs, file, stored, inside, values)
            shown = tuple(view.shape[dim] if dim in once else size for dim, size in enumerate(part_sizes))
            self._copies += [*copies, (local_view(view, inside, shown), values)]

    def _forget(self) -> None:
        self._copies.clear()
        self._results.clear()
        self.num_bytes = 0
        self._turning.used = 0
        if not self._is_adding:  # else a box in there waits for the rest of its parts
            self._casting.used = 0


def _has_long_runs(stored: _core.StoredTensor, strides: Sequence[int]) -> bool:
    """Whether the innermost elements lie side by side in the file and in memory, enough of them."""
    if 0 in stored.strides:
        return False
    if not stored.sizes or stored.sizes == (1,):
        return True
    if (stored.strides[-1], strides[-1]) != (1, 1):
        return False
    return stored.sizes[-1] * stored.item_bytes >= _MIN_RUN_BYTES or len(stored.sizes) == 1


def _converted(
    values: torch.Tensor, scales: torch.Tensor | None, dtypes: Sequence[torch.dtype], wanted: torch.dtype
) -> torch.Tensor:
    """Without the last cast where a copy makes it."""
    if dtypes and dtypes[-1] == wanted and scales is None:
        dtypes = dtypes[:-1]
    if scales is not None:
        values = values.to(torch.float32) * scales.to(torch.float32)
    for dtype in dtypes:
        values = values.to(dtype)
    return values
