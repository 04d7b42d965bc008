"""Reads items of a load plan together: stored boxes straight into their targets, those of an accelerator through
buckets, other records through a buffer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError
from torchtitan_ext.layout.dtensor import box_of, is_wrapper, local_view
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.state.host_copies import row_major_boxes, takes_operators
from torchtitan_ext.storage.native.device_buckets import IncomingBuckets
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import DTYPES

# Elements that are not read into place pass through buffers of so many bytes together.
CAST_BYTES = 16 << 20

# Files that are read together: a process may have 1,024 open.
_MAX_OPEN_FILES = 128


@dataclass
class _Target:
    """An item that is being read, and where to.

    Attributes:
        source: What was read, to copy from; ``None`` if it was read into the target or goes there through a bucket.
        is_written: Whether the target's own memory was read into. Autograd has not seen that.
    """

    item: ReadItem
    tensor: torch.Tensor
    source: torch.Tensor | None
    is_written: bool


class ReadBatch:
    """Items that are read together and given to the planner in stock's order: ``add`` items, then ``read``. At last
    ``finish``.

    Args:
        open_file: Adds a file of the checkpoint to a RunReader, and returns its number there.
        read_runs: Reads all that was added to a RunReader; gets the names of its files, or raises.
        on_bytes: Called with each number of bytes that were read.
        bucket_bytes: Called once if there are targets of an accelerator, for the size of their buckets.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        open_file: Callable[[_core.RunReader, str], int],
        read_runs: Callable[[_core.RunReader, list[str]], None],
        on_bytes: OnBytes,
        bucket_bytes: Callable[[], int],
    ) -> None:
        self._planner = planner
        self._open_file = open_file
        self._read_runs = read_runs
        self._on_bytes = on_bytes
        self._bucket_bytes = bucket_bytes
        self._buckets: IncomingBuckets | None = None
        self._runs = _core.RunReader()
        self._files: dict[str, int] = {}
        self._targets: list[_Target] = []
        self._values: list[tuple[ReadItem, bytearray, torch.Tensor | None]] = []
        self._copies: list[Copy] = []  # within what is read
        self._cast_bytes = 0
        self.num_bytes = 0
        """The bytes that ``read`` will read."""

    def add(self, name: str, item: ReadItem, info: Any, stored: _core.StoredTensor | None) -> None:
        """Adds an item. Where a bucket is full, ``read`` is called for those before.

        Args:
            name: Name of the file.
            info: The item's entry in the metadata's ``storage_data``.
            stored: Where the elements lie; ``None`` if only ``torch.load`` can read the record.
        """
        if name not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:
                self.read()
                self._runs, self._files = _core.RunReader(), {}
            self._files[name] = self._open_file(self._runs, name)
        file = self._files[name]
        if item.type == LoadItemType.BYTE_IO or stored is None:
            target = None if item.type == LoadItemType.BYTE_IO else self._target(item)
            self._runs.check_bytes(file, info.offset, info.length)  # before memory is asked for
            content = bytearray(info.length)
            self._values.append((item, content, target))
            self._runs.add_bytes(file, info.offset, info.length, _address(content))
            self.num_bytes += info.length
            return
        target = self._target(item)
        dtype = DTYPES[stored.dtype]
        if _goes_by_bucket(target):
            self._add_to_buckets(file, item, stored, target)
            return
        if is_plain_target(target, dtype):
            self._copies += add_box(self._runs, file, stored, item.storage_offsets, target)
            self._targets.append(_Target(item, target, None, is_written=True))
            self.num_bytes += target.nbytes
        elif is_wrapper(target):
            place = torch.empty(target.shape, dtype=dtype, device="cpu")
            self._copies += add_box(self._runs, file, stored, item.storage_offsets, place)
            self._targets.append(_Target(item, target, place, is_written=False))
            self.num_bytes += place.nbytes
        else:
            self._add_in_parts(file, item, stored, target)

    def read(self) -> None:
        """Reads all added items, and gives them to the planner.

        Raises:
            CheckpointReadError: A record of a subclass does not fit its target.
        """
        self._read_runs(self._runs, list(self._files))
        self._on_bytes(self.num_bytes)
        for item, content, target in self._values:
            if target is None:
                self._planner.load_bytes(item, io.BytesIO(content))
            else:
                self._targets.append(_Target(item, target, _loaded_box(item, content, target), is_written=False))
        with torch.no_grad():
            for place, values in self._copies:
                place.copy_(values)
            if self._buckets is not None:
                self._buckets.send()
            for one in self._targets:
                if one.source is not None:
                    _copy(one.item, one.tensor, one.source)
        # Inference tensors count no versions.
        written = [one.tensor for one in self._targets if one.is_written and not one.tensor.is_inference()]
        torch.autograd.graph.increment_version(written)
        for one in self._targets:
            self._planner.commit_tensor(one.item, one.tensor)
        self._targets, self._values, self._copies, self.num_bytes, self._cast_bytes = [], [], [], 0, 0

    def finish(self) -> None:
        """Reads what is left, and waits until all targets are filled."""
        self.read()
        if self._buckets is not None:
            self._buckets.finish()

    def _add_in_parts(self, file: int, item: ReadItem, stored: _core.StoredTensor, target: torch.Tensor) -> None:
        """Adds an item whose elements are cast, or not read into place for another reason, in parts of bounded size."""
        dtype = DTYPES[stored.dtype]
        # torch refuses to fill elements that share memory, if it sees all of them.
        max_elements = CAST_BYTES // dtype.itemsize if _has_own_elements(target) else max(1, target.numel())
        for part_offsets, part in row_major_boxes(target, max_elements):
            if self._cast_bytes + part.numel() * dtype.itemsize > CAST_BYTES:
                self.read()
            place = torch.empty(part.shape, dtype=dtype, device="cpu")
            begin = [offset + inside for offset, inside in zip(item.storage_offsets, part_offsets, strict=True)]
            self._copies += [*add_box(self._runs, file, stored, begin, place), (part, place)]
            self._cast_bytes += place.nbytes
            self.num_bytes += place.nbytes
        self._targets.append(_Target(item, target, None, is_written=False))

    def _add_to_buckets(self, file: int, item: ReadItem, stored: _core.StoredTensor, target: torch.Tensor) -> None:
        if self._buckets is None:
            self._buckets = IncomingBuckets(self._bucket_bytes())
        dtype = DTYPES[stored.dtype]
        offsets = list(item.storage_offsets)
        for part_offsets, part in row_major_boxes(target, self._buckets.bucket_bytes // dtype.itemsize):
            place = self._buckets.place(part, dtype)
            if place is None:
                self.read()
                place = self._buckets.place(part, dtype)
            assert place is not None, "an empty bucket has no room for a part, please report"
            begin = [offset + inside for offset, inside in zip(offsets, part_offsets, strict=True)]
            self._copies += add_box(self._runs, file, stored, begin, place)
            self.num_bytes += place.nbytes
        self._targets.append(_Target(item, target, None, is_written=False))

    def _target(self, item: ReadItem) -> torch.Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}: the planner resolved a "
                "target of another size than its item"
            )
        return target


def _goes_by_bucket(target: torch.Tensor) -> bool:
    """Whether a target is memory of an accelerator that takes our operators."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided or target.is_cpu:
        return False
    if target.is_conj() or target.is_neg() or target.is_inference():
        return False
    return takes_operators(target.device) and _has_own_elements(target)


def is_plain_target(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of a saved dtype can be written straight into the target's memory."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided or not target.is_cpu:
        return False
    if target.dtype != dtype or target.is_conj() or target.is_neg():
        return False
    return _has_own_elements(target)


def _has_own_elements(target: torch.Tensor) -> bool:
    return target.is_contiguous() or not _core.may_overlap_itself(target.shape, target.stride())


def _address(content: bytearray) -> int:
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr() if content else 0


def _loaded_box(item: ReadItem, content: bytearray, target: torch.Tensor) -> torch.Tensor:
    """The box that an item wants from a whole record of ``torch.save``.

    If the box cuts a block of a quantised tensor, a plain target gets dequantised values.
    """
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    box = box_of(tensor, item.storage_offsets, item.lengths)
    if not isinstance(box, str):
        return box
    if is_wrapper(target):
        raise CheckpointReadError(item.dest_index.fqn, f"as it was saved, {box}")
    return local_view(dense_values(tensor), item.storage_offsets, item.lengths)


def _copy(item: ReadItem, target: torch.Tensor, source: torch.Tensor) -> None:
    if not is_wrapper(target) and not is_wrapper(source):
        target.copy_(source)
        return
    try:
        target.copy_(source)
    except Exception as error:  # whatever the subclass raises
        kinds = f"a {type(source).__name__} was saved, the target is a {type(target).__name__}"
        reason = f"{kinds}, and copy_ fails ({type(error).__name__}: {error}); load into a target of the saved kind"
        raise CheckpointReadError(item.dest_index.fqn, reason) from error


Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


def add_box(
    runs: _core.RunReader, file: int, stored: _core.StoredTensor, offsets: Sequence[int], place: torch.Tensor
) -> list[Copy]:
    """Adds the box of a stored tensor at some offsets, of the size of ``place``, to the reads.

    Args:
        place: The target: strided, on the CPU, of the stored dtype; no two of its elements share memory.

    Returns:
        Copies to make after the read, in this order: the file stores one element for several (stride 0).

    Raises:
        DamagedCheckpointError: The tensor has another number of dims.
        FormatError: The box does not lie in the tensor, or the tensor not in the file.
    """
    if len(stored.sizes) != place.dim():
        raise DamagedCheckpointError(
            f"a tensor of sizes {list(stored.sizes)} lies at byte {stored.data_offset} of its file, expected one of "
            f"{place.dim()} dims"
        )
    copies: list[Copy] = []
    if not stored.is_row_major:  # few tensors
        for dim, stride in enumerate(stored.strides):
            if stride == 0 and place.shape[dim] > 1:
                first = place.narrow(dim, 0, 1)
                copies.append((place.narrow(dim, 1, place.shape[dim] - 1), first))
                place = first
    runs.add_box(file, stored, offsets, place.shape, place.data_ptr(), place.stride())
    return copies[::-1]
