"""What a plan has sent, box by box as it travels: later versions are compared with that, through casts and maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan_ext.layout.layout import shard_of_box
from torchtitan_ext.transfer.changed.changed_boxes import PackedChanges, packed_found
from torchtitan_ext.transfer.changed.changes import HeldTensor
from torchtitan_ext.transfer.changed.kept import Found, KeptValues
from torchtitan_ext.transfer.transport import Row, dtype_of, part_of, rows_of

_BATCH_BYTES = 16 << 20
"""Of boxes that are converted at once."""


class SentBoxes:
    """The boxes that a rank has sent, kept in host memory, in the dtypes in which they travelled.

    Each box is a tensor of its own, so that its elements are known by their places in it, and not by those in the
    source, which a map moves. Boxes are converted and compared in batches; one that several ranks get is kept once.
    """

    def __init__(self, sends: Tensor, sources: Sequence[Tensor]) -> None:
        """Keeps what the sources hold now."""
        unique: dict[object, int] = {}
        self._rows: list[Row] = []
        self._kept_as: list[int] = []  # of each box that is sent its row
        for row in rows_of(sends):
            number = unique.setdefault((id(sources[row.tensor]), row.cast_to, row.offsets, row.sizes), len(unique))
            self._kept_as.append(number)
            if number == len(self._rows):
                self._rows.append(row)
        self._kept = [
            KeptValues(batch, [_whole_tensor(tuple(box.shape)) for box in batch]) for batch in self._batches(sources)
        ]
        self._found: list[Found] = []

    @property
    def num_bytes(self) -> int:
        """Host memory."""
        return sum(batch.num_bytes for batch in self._kept)

    def find(self, sources: Sequence[Tensor]) -> PackedChanges:
        """What of the boxes the sources hold otherwise now, by bits."""
        self._found, packed = [], PackedChanges([], [])
        for kept, batch in zip(self._kept, self._batches(sources), strict=True):
            self._found.append(kept.find(batch))
            packed.extend(packed_found(self._found[-1], [box.itemsize for box in batch]))
        headers, data = packed
        return PackedChanges([headers[at] for at in self._kept_as], [data[at] for at in self._kept_as])

    def advance(self) -> None:
        """What ``find`` has found is what was sent."""
        for kept, found in zip(self._kept, self._found, strict=True):
            kept.advance(found)
        self._found = []

    def _batches(self, sources: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The boxes that are kept, as they travel: the same ones in each batch each time."""
        batch: list[Tensor] = []
        num_bytes = 0
        for row in self._rows:
            with torch.no_grad():
                batch.append(part_of(sources[row.tensor], row).to(dtype_of(row, sources)))
            num_bytes += batch[-1].numel() * batch[-1].itemsize
            if num_bytes >= _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch


def _whole_tensor(sizes: tuple[int, ...]) -> HeldTensor:
    return HeldTensor("", shard_of_box((0,) * len(sizes), sizes), sizes, None)
