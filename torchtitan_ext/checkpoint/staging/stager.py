"""Copies of a state dict in host memory, for saves that go on while training does.

The stagers of DCP copy storages and drop what a view adds to them: conjugated and negated views are saved unconjugated
and not negated, without an error, and a DTensor whose local tensor has a storage offset cannot be copied at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.staging.child_process import ChildProcess
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.checkpoint.staging.host_buffers import SPARE, HostBuffer, HostBuffers
from torchtitan_ext.errors import WrongValueError, value_error
from torchtitan_ext.op_library import call
from torchtitan_ext.state.host_copies import flatten_to_host_


class CpuStager(AsyncStager):
    """Copies the elements of every tensor, of any layout and strides, and nothing else of their storages.

    A stager that is passed to several saves keeps its memory between them: one flat buffer, which grows to the largest
    state and is in use as long as any copy lives; a save that finds none free waits. For ``tte.async_save(...,
    stager=)`` and, with a planner for each save, ``dcp.async_save(..., async_stager=, planner=SavePlanner())``.

    Args:
        host_memory_bytes: How much host memory each buffer may have. Of a larger state ``tte.async_save`` copies what
            fits and writes the rest before it returns; ``stage`` refuses it.
        pin_memory: Whether the buffers are pinned for the accelerator; ``"auto"``: where there is one.
        num_buffers: How many saves can be under way at once.
        process: ``tte.async_save`` plans and writes in a child process of each rank, which sees the copies in shared
            memory and lives until ``close``, the end of this process, or a save that fails. Like the workers of a
            ``DataLoader`` it imports the main module, which needs ``if __name__ == "__main__":``.
            ``dcp.async_save`` has ``async_checkpointer_type`` instead.

    Raises:
        WrongValueError: An argument makes no sense.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        host_memory_bytes: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        num_buffers: int = 1,
        process: bool = False,
    ) -> None:
        if host_memory_bytes is not None and host_memory_bytes < 0:
            raise value_error(
                "CpuStager", "host_memory_bytes", host_memory_bytes, "a number of bytes, or None for no limit"
            )
        if pin_memory not in (True, False, "auto"):
            raise value_error("CpuStager", "pin_memory", pin_memory, 'True, False or "auto"')
        if num_buffers < 1:
            raise value_error("CpuStager", "num_buffers", num_buffers, "at least 1")
        if process and host_memory_bytes is not None:
            raise value_error(
                "CpuStager", "host_memory_bytes", host_memory_bytes, "None: a process writes nothing in portions"
            )
        is_pinned = torch.accelerator.is_available() if pin_memory == "auto" else pin_memory
        self.host_memory_bytes = host_memory_bytes
        self.process = process
        self.child_lock = threading.Lock()
        """Held by the save that uses the child process: without a process group nothing else keeps saves apart."""
        self._child: ChildProcess | None = None
        self._buffers = HostBuffers(num_buffers, is_pinned=is_pinned, is_shared=process)

    @classmethod
    def of_one_save(cls) -> CpuStager:
        """A stager that is closed after a save. Its memory is spare then, for that of the next save."""
        stager = cls()
        is_pinned = torch.accelerator.is_available()
        stager._buffers = HostBuffers(1, is_pinned=is_pinned, is_shared=False, spare=SPARE)
        return stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A deep copy of a state dict, whose tensors lie in CPU memory of their own. Not collective.

        Tensors that share memory share it in the copy, where they are views of the same elements (tied weights).
        Objects are copied by ``copy.deepcopy``. The caller may change the state dict as soon as this returns.

        Raises:
            WrongValueError: The state is larger than ``host_memory_bytes``.
        """
        memory = StateMemory(state_dict)
        num_bytes = flat_bytes(memory.tensors)
        if not self.has_room(num_bytes):
            raise WrongValueError(
                f"CpuStager: the state needs {num_bytes} bytes of host memory and host_memory_bytes is "
                f"{self.host_memory_bytes}; only tte.async_save writes a larger state, the rest of it before it returns"
            )
        copies, _ = self.copy(memory.tensors)
        return memory.around(copies)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a state of so many bytes may be copied as a whole."""
        return self.host_memory_bytes is None or num_bytes <= self.host_memory_bytes

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], HostBuffer | None]:
        """Contiguous copies of plain tensors, and the buffer in which they lie, aligned as by ``ops.flatten_into_``."""
        if not tensors:
            return [], None
        buffer = self._buffers.take(flat_bytes(tensors))
        flatten_to_host_(tensors, buffer.memory)
        return tensors_in(buffer.memory, tensors), buffer

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is complete."""

    def child(self) -> ChildProcess:
        """The child process; starts one where none lives."""
        if self._child is None or not self._child.is_alive:
            self.end_child()
            self._child = ChildProcess()
        return self._child

    def end_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """Gives the buffers back, each as soon as no copy in it lives, and ends the child process.

        Call it when the last save has ended. The stager can be used again.
        """
        self._buffers.close()
        self.end_child()


def tensors_in(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a flat buffer in host memory, with the shapes and dtypes of ``like``.

    Unlike a view, each has a storage of its own that ends with it: saved alone, it does not bring the whole buffer
    along. The buffer lives as long as any of them.
    """
    return list(call("buffer_tensors", (memory, list(like), ops.DEFAULT_ALIGNMENT)))


def flat_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """At least the size of the flat buffer of the tensors."""
    return sum(tensor.nbytes for tensor in tensors) + ops.DEFAULT_ALIGNMENT * len(tensors)
