"""One side of a planned transfer on one rank: which boxes of which tensors travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_ext import _core
from torchtitan_ext.layout.dtensor import view_of
from torchtitan_ext.transfer.endpoint import Endpoint


class Side:
    """What a rank sends, or what it receives.

    Attributes:
        boxes: A table of boxes of ``tensors``, as ``ops.exchange_runs_`` takes it.
        changed: The numbers of the boxes that a cast or a map changes, the same boxes on both sides.
        bytes_of_peer: To or from each rank.
    """

    def __init__(self, endpoint: Endpoint, told: bytes, *, is_filled: bool) -> None:
        """``told``: what the plan tells this rank, for ``_core.expand_transfers``."""
        table = _core.expand_transfers(told, endpoint.first_tensor, len(endpoint.tensors))
        entries = bytearray(table.entries)
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self.boxes = torch.frombuffer(entries, dtype=torch.int64) if entries else nothing
        self.changed: Sequence[int] = table.changed
        self.bytes_of_peer: Mapping[int, int] = table.bytes_of_peer
        self._endpoint, self._views, self._is_filled = endpoint, table.views, is_filled
        self._kept: list[Tensor] | None = None

    def tensors(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """The memory of the endpoint's tensors and, behind it, views of some of them: of what a map moves.

        Of tensors that are filled by views alone stand-ins without elements remain, since no two may share memory.
        Views of memory that stays from run to run are made once.
        """
        if self._kept is not None:
            return self._kept
        tensors = list(memory)
        for number, view in self._views:
            tensors.append(view_of(memory[number], view))
            if self._is_filled:
                tensors[number] = memory[number].new_empty(0)
        self._kept = tensors if self._endpoint.is_memory else None
        return tensors

    def name_of(self, tensor: int) -> str:
        """The key of one of ``tensors``."""
        in_memory = len(self._endpoint.tensors)
        return self._endpoint.names[tensor if tensor < in_memory else self._views[tensor - in_memory][0]]
