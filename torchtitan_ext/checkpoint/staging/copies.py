"""The memory that a state dict consists of, and the state dict again around copies of that memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torchtitan_ext.dcp_private import ShardedTensor
from torchtitan_ext.layout.dtensor import (
    describes_itself,
    held_tensor,
    is_wrapper,
    local_tensor,
    with_local,
    with_parts,
)
from torchtitan_ext.layout.own_boxes import has_own_boxes, keep_own_boxes
from torchtitan_ext.layout.wrapper import parts_of
from torchtitan_ext.state.nested import nested_members

Recipe = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Makes a copy of a tensor of the state dict from the copies of its plain tensors."""


class StateMemory:
    """The plain tensors that a state dict consists of: local tensors of DTensors, parts of wrapper subclasses.

    Attributes:
        tensors: Dense and strided, on any device but meta; equal views of one memory stand there once (tied weights).
            Lazily conjugated and negated views stand there as copies that are neither. One device after the other.
    """

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._state_dict = state_dict
        members = nested_members(state_dict, (Mapping, list, tuple, set, frozenset))
        found = [member for member in members if isinstance(member, torch.Tensor)]
        if len({tensor.device for tensor in found}) > 1:
            found.sort(key=lambda tensor: str(tensor.device))
        self._found = {id(tensor): tensor for tensor in found}
        self._positions: dict[Any, int] = {}  # in ``tensors``, by what tells views of one memory apart
        self._originals: list[torch.Tensor] = []  # of ``tensors``: no other tensor may get their memory meanwhile
        # Of the tensors found; without them, ``tensors`` are those or their local tensors.
        self._recipes: list[Recipe] | None = None
        held = [held_tensor(one) if isinstance(one, DTensor) else one for one in self._found.values()]
        if _are_plain(held) and not _share_memory(held):
            self.tensors = held
        else:
            self._recipes = list(map(self._recipe, self._found.values()))

    def around(self, copies: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """A deep copy of the state dict in which these contiguous copies of ``tensors`` stand for them."""
        if self._recipes is not None:
            copies = [recipe(copies) for recipe in self._recipes]
        else:
            copies = list(map(_made_like, self._found.values(), self.tensors, copies))
        return copy.deepcopy(self._state_dict, dict(zip(self._found, copies, strict=True)))

    def _recipe(self, tensor: torch.Tensor) -> Recipe:
        """How to make a copy of a tensor from the copies of ``tensors``."""
        if isinstance(tensor, DTensor):
            of_local = self._recipe(held_tensor(tensor))
            return lambda copies: with_local(tensor, of_local(copies))
        if isinstance(tensor, AsyncCollectiveTensor):
            return self._recipe(tensor.wait())
        if isinstance(tensor, ShardedTensor):  # knows few of a tensor's attributes; .cpu() of CPU memory is no copy
            sharded = copy.deepcopy(tensor.cpu())
            return lambda _: sharded
        if not _is_dense(tensor) or (describes_itself(tensor) and not has_own_boxes(tensor)):
            is_left = tensor.is_cpu or tensor.is_meta or describes_itself(tensor)
            whole = copy.deepcopy(tensor.detach()) if is_left else tensor.detach().cpu()
            keep_own_boxes(tensor, whole)
            return lambda _: whole
        if is_wrapper(tensor):
            of_parts = {name: self._recipe(part) for name, part in parts_of(tensor).items()}
            return lambda copies: keep_own_boxes(
                tensor, with_parts(tensor, {name: of_part(copies) for name, of_part in of_parts.items()})
            )
        position = self._position(local_tensor(tensor))
        needs_grad = tensor.requires_grad
        return lambda copies: keep_own_boxes(tensor, copies[position].detach().requires_grad_(needs_grad))

    def _position(self, tensor: torch.Tensor) -> int:
        """Where the memory of a tensor stands in ``tensors``; at the end if it is new."""
        is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
        layout = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), is_conj, is_neg)
        own = len(self.tensors)
        position = own if tensor.numel() == 0 else self._positions.setdefault((tensor.data_ptr(), layout), own)
        if position == own:
            self.tensors.append(tensor.resolve_conj().resolve_neg() if is_conj or is_neg else tensor)
            self._originals.append(tensor)
        return position


def _made_like(tensor: torch.Tensor, held: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The tensor again, around a copy of what it holds."""
    if held.requires_grad:
        copied.requires_grad_()
    return with_local(tensor, copied) if isinstance(tensor, DTensor) else copied


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of two of them begins in one place."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel() > 0]
    return len(set(addresses)) < len(addresses)


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and _is_dense(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or (tensor.__dict__ and describes_itself(tensor)))
        for tensor in tensors
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
