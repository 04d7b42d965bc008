"""Reads items of a load plan together: stored boxes straight into their targets, those of an accelerator through
buckets, other records through a buffer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError
from torchtitan_ext.layout.dtensor import box_of, is_plain_memory, is_wrapper, local_view, may_overlap_itself
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.state.host_copies import row_major_boxes, takes_operators
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.native.device_buckets import IncomingBuckets
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import DTYPES

# Elements that are not read into place pass through buffers of so many bytes together.
CAST_BYTES = 16 << 20

# Files that are read together: a process may have 1,024 open.
_MAX_OPEN_FILES = 128


class RecordFiles(Protocol):
    """What reads the files of a checkpoint: a ``FileReader``, or another source of ``offline``."""

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        """Where chunks lie."""
        ...

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        """Adds a file to a RunReader, and returns its number there."""
        ...

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        """Reads what was added."""
        ...


class OpenFiles:
    """The files of a checkpoint that are read together. They stay open from one read to the next: opening a file again
    reads the checksums of all its blocks again.

    Attributes:
        runs: To which reads are added.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self.close()

    def number_of(self, name: str, read_before: Callable[[], None]) -> int:
        """The number of a file in ``runs``; where too many are open, what was added is read first, and they close."""
        if name not in self._numbers:
            if len(self._numbers) >= _MAX_OPEN_FILES:
                read_before()
                self.close()
            self._numbers[name] = self._files.open_file(self.runs, name)
        return self._numbers[name]

    def read(self) -> None:
        """Reads what was added; after an error nothing of it is left.

        Raises:
            DamagedCheckpointError: Bytes are not what was written.
        """
        with self.forgotten_on_error():
            self._files.read_runs(self.runs, list(self._numbers))

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """The next call must not read what failed. Damage gets the error that callers know."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, (_core.FormatError, UnicodeDecodeError)):
                raise DamagedCheckpointError(str(error)) from None
            raise

    def close(self) -> None:
        """Forgets the files, and what was added and not read."""
        self.runs = _core.RunReader()
        self._numbers: dict[str, int] = {}


class ReadBatch:
    """Items that are read together and given to the planner in stock's order: ``add`` items, then ``read``. At last
    ``finish``.

    Args:
        files: Reads the files of the checkpoint.
        on_bytes: Called with each number of bytes that were read.
        bucket_bytes: Called once if there are targets of an accelerator, for the size of their buckets.
    """

    def __init__(
        self, planner: LoadPlanner, files: RecordFiles, on_bytes: OnBytes, bucket_bytes: Callable[[], int]
    ) -> None:
        self._planner = planner
        self._files = OpenFiles(files)
        self._on_bytes = on_bytes
        self._bucket_bytes = bucket_bytes
        self._buckets: IncomingBuckets | None = None
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []
        self._sources: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []  # with what was read, to copy from
        self._written: list[torch.Tensor] = []  # targets that were read into where they lie, unseen by autograd
        self._values: list[tuple[ReadItem, bytearray, torch.Tensor | None]] = []
        self._copies: list[Copy] = []  # within what is read
        self._cast_bytes = 0
        self.num_bytes = 0
        """The bytes that ``read`` will read."""

    def add(self, item: ReadItem, record: Record) -> None:
        """Adds an item, and where it lies. Where a bucket is full, ``read`` is called for those before."""
        file, runs, stored = self._files.number_of(record.file, self.read), self._files.runs, record.tensor
        if item.type == LoadItemType.BYTE_IO or stored is None:
            target = None if item.type == LoadItemType.BYTE_IO else self._target(item)
            runs.check_bytes(file, record.offset, record.num_bytes)  # before memory is asked for
            content = bytearray(record.num_bytes)
            self._values.append((item, content, target))
            runs.add_bytes(file, record.offset, record.num_bytes, _address(content))
            self.num_bytes += record.num_bytes
            return
        target = self._target(item)
        dtype = DTYPES[stored.dtype]
        if is_plain_target(target, dtype):
            self._copies += add_box(self._files.runs, file, stored, item.storage_offsets, target)
            self._written.append(target)
            self.num_bytes += target.nbytes
        elif is_wrapper(target):
            place = torch.empty(target.shape, dtype=dtype, device="cpu")
            self._copies += add_box(self._files.runs, file, stored, item.storage_offsets, place)
            self._sources.append((item, target, place))
            self.num_bytes += place.nbytes
        else:
            self._add_in_parts(file, item, stored, target)
        self._targets.append((item, target))

    def read(self) -> None:
        """Reads all added items, and gives them to the planner.

        Raises:
            CheckpointReadError: A record of a subclass does not fit its target.
        """
        self._files.read()
        self._on_bytes(self.num_bytes)
        for item, content, target in self._values:
            if target is None:
                self._planner.load_bytes(item, io.BytesIO(content))
            else:
                self._targets.append((item, target))
                self._sources.append((item, target, _loaded_box(item, content, target)))
        with torch.no_grad():
            for place, values in self._copies:
                place.copy_(values)
            if self._buckets is not None:
                self._buckets.send()
            for item, tensor, source in self._sources:
                _copy(item, tensor, source)
        # Inference tensors count no versions.
        torch.autograd.graph.increment_version([tensor for tensor in self._written if not tensor.is_inference()])
        for item, tensor in self._targets:
            self._planner.commit_tensor(item, tensor)
        self._targets, self._sources, self._written, self._values, self._copies = [], [], [], [], []
        self.num_bytes = self._cast_bytes = 0

    def finish(self) -> None:
        """Reads what is left, and waits until all targets are filled."""
        self.read()
        if self._buckets is not None:
            self._buckets.finish()

    def _add_in_parts(self, file: int, item: ReadItem, stored: _core.StoredTensor, target: torch.Tensor) -> None:
        """Adds an item in parts of bounded size: one that goes through buckets, or whose elements are cast, or not read
        into place for another reason."""
        dtype, by_bucket = DTYPES[stored.dtype], _goes_by_bucket(target)
        if by_bucket:
            self._buckets = self._buckets or IncomingBuckets(self._bucket_bytes())
            max_elements = self._buckets.bucket_bytes // dtype.itemsize
        else:
            # torch refuses to fill elements that share memory, if it sees all of them.
            max_elements = max(1, target.numel()) if may_overlap_itself(target) else CAST_BYTES // dtype.itemsize
        for part_offsets, part in row_major_boxes(target, max_elements):
            place = self._place_in_bucket(part, dtype) if by_bucket else self._place_to_cast(part, dtype)
            begin = [offset + inside for offset, inside in zip(item.storage_offsets, part_offsets, strict=True)]
            self._copies += add_box(self._files.runs, file, stored, begin, place)
            self._copies += [] if by_bucket else [(part, place)]
            self.num_bytes += place.nbytes

    def _place_to_cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._cast_bytes + part.numel() * dtype.itemsize > CAST_BYTES:
            self.read()
        place = torch.empty(part.shape, dtype=dtype, device="cpu")
        self._cast_bytes += place.nbytes
        return place

    def _place_in_bucket(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self._buckets is not None
        place = self._buckets.place(part, dtype)
        if place is None:
            self.read()
            place = self._buckets.place(part, dtype)
        assert place is not None, "an empty bucket has no room for a part, please report"
        return place

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
    return (
        not target.is_cpu and not target.is_inference() and is_plain_memory(target) and takes_operators(target.device)
    )


def is_plain_target(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of a saved dtype can be written straight into the target's memory."""
    return target.is_cpu and target.dtype == dtype and is_plain_memory(target)


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
