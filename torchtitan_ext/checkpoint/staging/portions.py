"""States that are larger than the host memory a stager may use: what fits is copied, the rest is written at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.checkpoint.staging.stager import CpuStager


class Portions:
    """One save in portions. A ``FileWriter`` writes first what lies in the caller's tensors, then what was copied.

    Attributes:
        rest_is_written: Set when nothing more is read from the caller's tensors.
        rest_bytes: How much was written before that.
        is_given_up: Whether the caller no longer waits for that, and may change its tensors: then the save must fail.
    """

    def __init__(self, stager: CpuStager) -> None:
        self._stager = stager
        self.rest_is_written = threading.Event()
        self.rest_bytes = 0
        self.is_given_up = False

    def stage(self, plan: SavePlan, planner: SavePlanner) -> StagedPart:
        """Copies what fits, the last items of the plan first."""
        room = self._stager.host_memory_bytes or 0
        part = StagedPart(planner, self)
        if not plan.items:  # a storage asks for no portion then
            self.rest_is_written.set()
        for item in reversed(plan.items):
            num_bytes = item.tensor_storage_size() or 0
            needed = num_bytes + ops.DEFAULT_ALIGNMENT
            self.rest_bytes += num_bytes
            if num_bytes == 0 or needed > room:
                continue
            value = planner.resolve_data(item)
            part.resolved[item.index] = value
            if type(value) is torch.Tensor and value.nbytes == num_bytes:  # not a subclass, which has bytes of its own
                part.copies[item.index] = value
                self.rest_bytes -= num_bytes
                room -= needed
        memory = StateMemory(part.copies)
        part.copies = memory.around(self._stager.copy(memory.tensors).tensors)
        part.resolved.update(part.copies)
        return part


class StagedPart:
    """What a storage asks of a planner: the copies of some items, and the others from the planner.

    Attributes:
        resolved: What the planner gave already, which may be asked once for each item, and the copies.
        copies: The copies alone.
    """

    def __init__(self, planner: SavePlanner, portions: Portions) -> None:
        self.resolved: dict[MetadataIndex, Any] = {}
        self.copies: dict[MetadataIndex, Any] = {}
        self._planner = planner
        self._portions = portions

    def portions(self, items: list[WriteItem]) -> Iterator[list[WriteItem]]:
        """What is not copied, then the copies. The caller may go on as soon as a storage asks for these."""
        yield [item for item in items if item.index not in self.copies]
        if self._portions.is_given_up:
            raise RuntimeError("the call of async_save was interrupted before it was done with the tensors")
        self._portions.rest_is_written.set()
        yield [item for item in items if item.index in self.copies]

    def resolve_data(self, item: WriteItem) -> Any:
        return self.resolved[item.index] if item.index in self.resolved else self._planner.resolve_data(item)
