"""Boxes of tensors that are filled from files together: straight where that can be, those of an accelerator through
buckets, others through a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from torchtitan_ext import _core, ops
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import is_plain_memory, is_wrapper, may_overlap_itself
from torchtitan_ext.layout.layout import aligned
from torchtitan_ext.state.host_copies import BUCKET_BYTES, row_major_boxes, takes_operators
from torchtitan_ext.storage.native.device_buckets import IncomingBuckets
from torchtitan_ext.storage.native.open_files import OpenFiles
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import converted, dtype_name

# Elements that are not read into place pass through a buffer of this size: with casts 4 and 32 MiB were slower.
BUFFER_BYTES = 8 << 20

ReadInto = Callable[[Sequence[int], torch.Tensor], object]
"""Adds the reads of a part of a box: its offsets in the box, and the CPU tensor that these reads fill, of the saved
dtype or one to which the native reader casts that."""


class Elements(NamedTuple):
    """The saved elements of a box.

    Attributes:
        dtypes: The dtypes that they have in turn: the saved one, then each to which they are cast.
        read_into: How they are read.
        scales: The dtype of what they are multiplied by, in float32, and how that is read.
    """

    dtypes: Sequence[torch.dtype]
    read_into: ReadInto
    scales: tuple[torch.dtype, ReadInto] | None = None


def copy_values(fqn: str, target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a target.

    Raises:
        CheckpointReadError: One of both is of a subclass, whose ``copy_`` fails.
    """
    if not is_wrapper(target) and not is_wrapper(values):
        target.copy_(values)
        return
    try:
        target.copy_(values)
    except Exception as error:  # whatever the subclass raises
        kinds = f"a {type(values).__name__} was saved, the target is a {type(target).__name__}"
        reason = f"{kinds}, and copy_ fails ({type(error).__name__}: {error}); load into a target of the saved kind"
        raise CheckpointReadError(fqn, reason) from error


class Fills:
    """Targets that are filled together: ``add`` them, then ``read``; at last ``finish``.

    Args:
        files: To which ``Elements`` add their reads.
        on_bytes: Called with each number of bytes that were read.
        bucket_bytes: Called once if there are targets of an accelerator, for the size of their buckets.
        copy: Copies the values for a key, of a dtype that may be another, into a target. One of the caller's own gets
            all values that are cast: none are cast while they are read.

    Attributes:
        num_bytes: That the next ``read`` reads.
    """

    def __init__(
        self,
        files: OpenFiles,
        *,
        on_bytes: OnBytes = lambda _: None,
        bucket_bytes: Callable[[], int] = lambda: BUCKET_BYTES,
        copy: Callable[[str, torch.Tensor, torch.Tensor], object] = copy_values,
    ) -> None:
        self._files = files
        self._on_bytes = on_bytes
        self._bucket_bytes = bucket_bytes
        self._copy = copy
        self._buckets: IncomingBuckets | None = None
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self._forget()

    def add(self, fqn: str, target: torch.Tensor, elements: Elements) -> None:
        """Adds a target, and the elements that it gets. Where the buffer or the bucket is full, ``read`` is called for
        those before.

        Args:
            target: On any device, any strides; a subclass is filled by its ``copy_``.
        """
        if elements.scales is None and self._is_read_into(target, elements.dtypes):
            elements.read_into((0,) * target.dim(), target)
            self._written.append(target)
            self.num_bytes += target.numel() * elements.dtypes[0].itemsize
            return
        buckets = self._buckets_of(target)
        for inside, part in _parts_of(target, elements, BUFFER_BYTES if buckets is None else buckets.bucket_bytes):
            place, scales = (
                self._places(part, elements) if buckets is None else self._places_in(buckets, part, elements)
            )
            elements.read_into(inside, place)
            self.num_bytes += place.nbytes
            if elements.scales is not None and scales is not None:
                elements.scales[1](inside, scales)
                self.num_bytes += scales.nbytes
            if buckets is None:
                convert = partial(converted, scales=scales, dtypes=elements.dtypes[1:], wanted=part.dtype)
                self._copies.append((fqn, part, place, convert))

    def read(self) -> None:
        """Fills all targets that were added.

        Raises:
            CheckpointReadError: Elements do not fit a target of a subclass.
            DamagedCheckpointError: Bytes are not what was written.
            OSError: A file cannot be read.
        """
        try:
            self._files.read()
            self._on_bytes(self.num_bytes)
            with torch.no_grad():
                if self._buckets is not None:
                    self._buckets.send()
                for fqn, target, values, convert in self._copies:
                    self._copy(fqn, target, convert(values))
            # Inference tensors count no versions.
            torch.autograd.graph.increment_version([one for one in self._written if not one.is_inference()])
        finally:
            self._forget()

    def finish(self) -> None:
        """Waits until all targets are filled that were read."""
        if self._buckets is not None:
            self._buckets.finish()

    def _is_read_into(self, target: torch.Tensor, dtypes: Sequence[torch.dtype]) -> bool:
        """Whether the native reader itself fills a target with elements that have these dtypes in turn: it makes one
        cast at most."""
        if not target.is_cpu or not is_plain_memory(target):
            return False
        saved, *casts = [dtype for dtype, _ in groupby((*dtypes, target.dtype))]
        if not casts:
            return True
        has_cast = len(casts) == 1 and _core.has_cast(dtype_name(saved), dtype_name(casts[0]))
        return has_cast and self._copy is copy_values

    def _buckets_of(self, target: torch.Tensor) -> IncomingBuckets | None:
        """The buckets by which a target is filled: memory of an accelerator that takes our operators."""
        if target.is_cpu or target.is_inference() or not is_plain_memory(target) or not takes_operators(target.device):
            return None
        self._buckets = self._buckets or IncomingBuckets(self._bucket_bytes())
        return self._buckets

    def _places(self, part: torch.Tensor, elements: Elements) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._make_room(part.numel() * _item_bytes(elements))
        place = self._take(part.shape, elements.dtypes[0])
        return place, None if elements.scales is None else self._take(part.shape, elements.scales[0])

    def _make_room(self, num_bytes: int) -> None:
        """Reads what was added before, where the buffer has not so much room left."""
        if self._used > 0 and self._used + num_bytes > BUFFER_BYTES:
            self.read()

    def _take(self, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Room in the buffer; memory of its own where there is not enough."""
        begin, num_bytes = self._used, sizes.numel() * dtype.itemsize
        self._used = aligned(begin + num_bytes)
        if begin + num_bytes > BUFFER_BYTES:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        if self._buffer is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        return self._buffer[begin : begin + num_bytes].view(dtype).view(sizes)

    def _places_in(
        self, buckets: IncomingBuckets, part: torch.Tensor, elements: Elements
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale_dtype = None if elements.scales is None else elements.scales[0]
        places = buckets.place(part, elements.dtypes, scale_dtype)
        if places is None:
            self.read()
            places = buckets.place(part, elements.dtypes, scale_dtype)
        assert places is not None, "an empty bucket has no room for a part, please report"
        return places

    def _forget(self) -> None:
        self._written: list[torch.Tensor] = []  # read into where they lie, unseen by autograd
        # With what was read, and what is made of it.
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []
        self._used = 0
        self.num_bytes = 0


def _parts_of(target: torch.Tensor, elements: Elements, room: int) -> Iterable[tuple[tuple[int, ...], torch.Tensor]]:
    """Cuts a target into boxes (offsets, view) whose elements and scales take at most ``room`` bytes, aligned."""
    # torch refuses to fill elements that share memory, if it sees all of them.
    if is_wrapper(target) or may_overlap_itself(target):
        return [((0,) * target.dim(), target)]
    if elements.scales is not None:
        room -= 2 * ops.DEFAULT_ALIGNMENT
    return row_major_boxes(target, max(1, room // _item_bytes(elements)))


def _item_bytes(elements: Elements) -> int:
    """The memory that an element takes on its way, with its scale."""
    item_bytes = max(dtype.itemsize for dtype in elements.dtypes)
    return item_bytes if elements.scales is None else item_bytes + elements.scales[0].itemsize
