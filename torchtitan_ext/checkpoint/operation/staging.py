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
        copies: dict[int, Any] = {}
        _copy_tensors(state_dict, copies, {}, set())
        return copy.deepcopy(state_dict, copies)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is complete."""

    def close(self) -> None:
        """Nothing is kept between saves."""


def _copy_tensors(
    value: Any, copies: dict[int, Any], known: dict[Any, tuple[torch.Tensor, torch.Tensor]], seen: set[int]
) -> None:
    """Fills deepcopy's memo (by id) with the copies of all tensors in nested containers, each looked at once."""
    if isinstance(value, torch.Tensor):
        copies[id(value)] = cpu_copy(value, known)
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)) and id(value) not in seen:
        seen.add(id(value))
        for member in value.values() if isinstance(value, Mapping) else value:
            _copy_tensors(member, copies, known, seen)
