"""What a plan has sent, box by box as it travels: later versions are compared with that, through casts and maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan_ext import _core
from torchtitan_ext.layout.layout import aligned, num_elements, shard_of_box
from torchtitan_ext.transfer.changed.changes import HeldTensor
from torchtitan_ext.transfer.changed.kept import Found, KeptValues
from torchtitan_ext.transfer.transport import dtype_of, exchange_table, part_of

_BATCH_BYTES = 16 << 20
"""Of boxes that are converted at once."""


class SentBoxes:
    """The boxes that a rank has sent, kept in host memory, in the dtypes in which they travelled.

    Each box is a tensor of its own, so that its elements are known by their places in it, and not by those in the
    source, which a map moves. Boxes are converted and compared in batches; one that several ranks get is kept once.
    """

    def __init__(self, sends: Tensor, sources: Sequence[Tensor]) -> None:
        """Keeps what the sources hold now."""
        table = exchange_table(sends, sources)
        firsts, self._kept_as = table.distinct([id(tensor) for tensor in sources])
        boxes = table.boxes
        self._batches: list[list[tuple[_core.ExchangeBox, int]]] = []  # with the byte of the batch at which each begins
        end, most = _BATCH_BYTES, 0
        for box in map(boxes.__getitem__, firsts):
            if end >= _BATCH_BYTES:
                self._batches.append([])
                end = 0
            self._batches[-1].append((box, end))
            end += aligned(num_elements(box.sizes) * dtype_of(box, sources).itemsize)
            most = max(most, end)
        with torch.inference_mode(False):  # it is written again outside of inference mode
            self._converted = torch.empty(most, dtype=torch.uint8, device="cpu")
        self._kept = [
            KeptValues(batch, [_whole_tensor(tuple(box.shape)) for box in batch]) for batch in self._as_sent(sources)
        ]
        self._found: list[Found] = []

    def find(self, table: _core.ExchangeTable, sources: Sequence[Tensor]) -> _core.OutgoingChanges:
        """What of the boxes the sources hold otherwise now, by bits; ``table`` is that of the boxes that are sent."""
        self._found, packed = [], _core.PackedBoxes()
        for kept, batch in zip(self._kept, self._as_sent(sources), strict=True):
            found = kept.find(batch)
            elements = found.positions.numpy(), found.values.numpy()
            items = [box.itemsize for box in batch]
            packed.add_compared(items, found.counts, list(found.whole), *elements, found.old_sums)
            self._found.append(found)
        return _core.OutgoingChanges(table, packed, self._kept_as)

    def advance(self) -> None:
        """What ``find`` has found is what was sent."""
        for kept, found in zip(self._kept, self._found, strict=True):
            kept.advance(found)
        self._found = []

    def _as_sent(self, sources: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The boxes that are kept, as they travel, by batches. What is converted in host memory lasts until the next
        batch: memory that is new each time costs a third of the conversion."""
        for batch in self._batches:
            boxes = []
            for box, begin in batch:
                part, dtype = part_of(sources[box.tensor].detach(), box), dtype_of(box, sources)
                if part.dtype == dtype or part.device.type != "cpu":
                    boxes.append(part.to(dtype))
                    continue
                space = self._converted[begin : begin + part.numel() * dtype.itemsize]
                boxes.append(space.view(dtype).view(part.shape).copy_(part))
            yield boxes


def _whole_tensor(sizes: tuple[int, ...]) -> HeldTensor:
    return HeldTensor("", shard_of_box((0,) * len(sizes), sizes), sizes, None)
