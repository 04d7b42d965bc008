"""Copies of a state dict in CPU memory, for saves that go on while training does.

The stagers of DCP copy storages and drop what a view adds to them: conjugated and negated views are saved unconjugated
and not negated, without an error, and a DTensor whose local tensor has a storage offset cannot be copied at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext.layout.dtensor import cpu_copy
from torchtitan_ext.state.nested import nested_members


class CpuStager(AsyncStager):
    """Copies the elements of every tensor, of any layout and strides, and nothing else of their storages.

    ``tte.async_save`` uses it. With stock: ``dcp.async_save(..., async_stager=CpuStager(), planner=SavePlanner())``.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A deep copy of a state dict; its tensors lie in CPU memory of their own. Not collective.

        Tensors that share memory share it in the copy, where they are views of the same elements (tied weights).
        Objects are copied by ``copy.deepcopy``.
        """
        copies: dict[int, Any] = {}  # deepcopy's memo, by id
        known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for member in nested_members(state_dict, (Mapping, list, tuple, set, frozenset)):
            if isinstance(member, torch.Tensor):
                copies[id(member)] = cpu_copy(member, known)
        return copy.deepcopy(state_dict, copies)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is complete."""

    def close(self) -> None:
        """Nothing is kept between saves."""
