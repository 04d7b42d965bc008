"""Copies of a state dict in host memory, for saves that go on while training does.

The stagers of DCP copy storages and drop what a view adds to them: conjugated and negated views are saved unconjugated
and not negated, without an error, and a DTensor whose local tensor has a storage offset cannot be copied at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.checkpoint.staging.host_buffers import SPARE, HostBuffers
from torchtitan_ext.errors import value_error
from torchtitan_ext.op_library import call
from torchtitan_ext.state.host_copies import flatten_to_host_


class CpuStager(AsyncStager):
    """Copies the elements of every tensor, of any layout and strides, and nothing else of their storages.

    A stager that is passed to several saves keeps its memory between them: one flat buffer, which grows to the largest
    state and is in use as long as any copy lives; a save that finds none free waits. For ``tte.async_save(...,
    stager=)`` and, with a planner for each save, ``dcp.async_save(..., async_stager=, planner=SavePlanner())``.

    Args:
        pin_memory: Whether the buffers are pinned for the accelerator; ``"auto"``: where there is one.
        num_buffers: How many saves can be under way at once.

    Raises:
        WrongValueError: An argument makes no sense.
    """

    _synchronize_after_execute = False

    def __init__(self, pin_memory: bool | Literal["auto"] = "auto", num_buffers: int = 1) -> None:
        if pin_memory not in (True, False, "auto"):
            raise value_error("CpuStager", "pin_memory", pin_memory, 'True, False or "auto"')
        if num_buffers < 1:
            raise value_error("CpuStager", "num_buffers", num_buffers, "at least 1")
        is_pinned = torch.accelerator.is_available() if pin_memory == "auto" else pin_memory
        self._buffers = HostBuffers(num_buffers, is_pinned=is_pinned)

    @classmethod
    def of_one_save(cls) -> CpuStager:
        """A stager that is closed after a save. Its memory is spare then, for that of the next save."""
        stager = cls()
        is_pinned = torch.accelerator.is_available()
        stager._buffers = HostBuffers(1, is_pinned=is_pinned, spare=SPARE)
        return stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A deep copy of a state dict, whose tensors lie in CPU memory of their own. Not collective.

        Tensors that share memory share it in the copy, where they are views of the same elements (tied weights).
        Objects are copied by ``copy.deepcopy``. The caller may change the state dict as soon as this returns.

        Raises:
            MemoryError: The host has no room for the copy.
        """
        memory = StateMemory(state_dict)
        return memory.around(self._copy(memory.tensors))

    @torch.no_grad()
    def _copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies of plain tensors.

        Unlike a view of the buffer in which they lie, each has a storage of its own that ends with it: saved alone, it
        does not bring the whole buffer along. The buffer lives as long as any of them.
        """
        if not tensors:
            return []
        # At least the size of the flat buffer of the tensors.
        buffer = self._buffers.take(sum(tensor.nbytes for tensor in tensors) + ops.DEFAULT_ALIGNMENT * len(tensors))
        flatten_to_host_(tensors, buffer)
        return list(call("buffer_tensors", (buffer, list(tensors), ops.DEFAULT_ALIGNMENT)))

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is complete."""

    def close(self) -> None:
        """Gives the buffers back, each as soon as no copy in it lives.

        Call it when the last save has ended. The stager can be used again.
        """
        self._buffers.close()
