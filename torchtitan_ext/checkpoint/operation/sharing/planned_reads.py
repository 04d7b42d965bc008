"""What one rank reads of the tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext.checkpoint.planners.items import in_file_order
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.futures import result_of


@dataclass(frozen=True)
class PlannedReads:
    """What this rank reads of the tensors of one checkpoint: the plan has items of tensors only."""

    reader: StorageReader
    planner: LoadPlanner
    plan: LoadPlan

    def read(self, items: Sequence[ReadItem]) -> None:
        """Reads items, or parts of items, into their targets."""
        if items:
            ordered = in_file_order(list(items), self.planner.metadata)
            result_of(self.reader.read_data(replace(self.plan, items=ordered), self.planner))

    def split(self, num_bytes: int) -> tuple[list[ReadItem], PlannedReads]:
        """The first items of about so many bytes, and all others. One is cut where parts can be read alone."""
        first: list[ReadItem] = []
        others: list[ReadItem] = []
        for item in self.plan.items:
            of_item = bytes_of(item, self)
            if of_item <= num_bytes:
                first.append(item)
                num_bytes -= of_item
                continue
            rows = math.floor(max(item.lengths, default=1) * num_bytes / of_item)
            if rows > 0 and isinstance(self.reader, FileReader):
                head, item = _cut_in_two(item, rows)
                first.append(head)
            others.append(item)
            num_bytes = 0
        return first, replace(self, plan=replace(self.plan, items=others))


def _cut_in_two(item: ReadItem, rows: int) -> tuple[ReadItem, ReadItem]:
    """The first rows of its longest dim, and the others."""
    dim = max(range(len(item.lengths)), key=lambda one: item.lengths[one])

    def moved(offsets: torch.Size) -> torch.Size:
        return torch.Size((*offsets[:dim], offsets[dim] + rows, *offsets[dim + 1 :]))

    def of_rows(count: int) -> torch.Size:
        return torch.Size((*item.lengths[:dim], count, *item.lengths[dim + 1 :]))

    rest = replace(
        item,
        dest_offsets=moved(item.dest_offsets),
        storage_offsets=moved(item.storage_offsets),
        lengths=of_rows(item.lengths[dim] - rows),
    )
    return replace(item, lengths=of_rows(rows)), rest


def bytes_of(item: ReadItem, source: PlannedReads) -> int:
    saved = source.planner.metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(saved, TensorStorageMetadata)
    return math.prod(item.lengths) * saved.properties.dtype.itemsize
