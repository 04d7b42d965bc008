"""What one rank reads of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext import _core
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

    @property
    def can_cut(self) -> bool:
        """Whether parts of items can be read alone: of others' readers nobody knows."""
        return isinstance(self.reader, FileReader)

    def read(self, items: Sequence[ReadItem]) -> None:
        """Reads items, or parts of items, into their targets."""
        if items:
            ordered = in_file_order(list(items), self.planner.metadata)
            result_of(self.reader.read_data(replace(self.plan, items=ordered), self.planner))


def reads_of(sources: Sequence[PlannedReads]) -> _core.RankReads:
    """All items of all sources."""
    metadata = [source.planner.metadata.state_dict_metadata for source in sources]
    return _core.RankReads([source.plan.items for source in sources], metadata)
