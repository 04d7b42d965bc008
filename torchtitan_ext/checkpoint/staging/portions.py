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

    From ``stage`` on a storage may ask it in the place of the planner.

    Attributes:
        rest_is_written: Set when nothing more is read from the caller's tensors.
        rest_bytes: How much was written before that.
        is_given_up: Whether the caller no longer waits for that, and may change its tensors: then the save must fail.
        resolved: What the planner gave already, which may be asked once for each item, and the copies.
        copies: The copies alone.
    """

    def __init__(self, stager: CpuStager) -> None:
        self._stager = stager
        self._planner: SavePlanner
        self.rest_is_written = threading.Event()
        self.rest_bytes = 0
        self.is_given_up = False
        self.resolved: dict[MetadataIndex, Any] = {}
        self.copies: dict[MetadataIndex, Any] = {}

    def stage(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copies what fits, the last items of the plan first."""
        self.clear()
        self._planner, self.rest_bytes = planner, 0
        room = self._stager.host_memory_bytes or 0
        if not plan.items:  # a storage asks for no portion then
            self.rest_is_written.set()
        for item in reversed(plan.items):
            num_bytes = item.tensor_storage_size() or 0
            needed = num_bytes + ops.DEFAULT_ALIGNMENT
            self.rest_bytes += num_bytes
            if num_bytes == 0 or needed > room:
                continue
            value = self.resolved[item.index] = planner.resolve_data(item)
            if type(value) is torch.Tensor and value.nbytes == num_bytes:  # not a subclass, which has bytes of its own
                self.copies[item.index] = value
                self.rest_bytes -= num_bytes
                room -= needed
        memory = StateMemory(self.copies)
        copies, _ = self._stager.copy(memory.tensors)
        self.copies = memory.around(copies)
        self.resolved.update(self.copies)

    def clear(self) -> None:
        """Lets go of the copies."""
        self.resolved, self.copies = {}, {}

    def portions(self, items: list[WriteItem]) -> Iterator[list[WriteItem]]:
        """What is not copied, then the copies. The caller may go on as soon as a storage asks for these."""
        yield [item for item in items if item.index not in self.copies]
        if self.is_given_up:
            raise RuntimeError("the call of async_save was interrupted before it was done with the tensors")
        self.rest_is_written.set()
        yield [item for item in items if item.index in self.copies]

    def resolve_data(self, item: WriteItem) -> Any:
        return self.resolved[item.index] if item.index in self.resolved else self._planner.resolve_data(item)
