"""The tensors of modules and state dicts by canonical name, and why a tensor cannot take part."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import canonical_fqn
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.sync.calls import ModuleCall

ModuleOrState = nn.Module | Sequence[nn.Module] | Mapping[str, Any]
"""A module, its pipeline parts on this rank, or a nested state dict."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a module or state dict. ``kind`` decides whether a plain one may be taken for a replica."""

    fqn: str
    value: Tensor
    kind: Literal["param", "buffer", "state"]


def list_tensors(source: ModuleOrState, call: ModuleCall) -> list[NamedTensor]:
    """The tensors that a call asks for, in order.

    FSDP2 modules are resharded first: what is written into unsharded parameters vanishes at the next reshard.
    """
    named: list[NamedTensor] = []
    if isinstance(source, Mapping):
        flat = flat_keys(source, is_whole=lambda fqn, wrapper: True).values
        named = [
            NamedTensor(canonical_fqn(fqn), value, "state") for fqn, value in flat.items() if isinstance(value, Tensor)
        ]
    elif isinstance(source, nn.Module):
        named = list(_tensors_of_module(source, call))
    else:
        for index, part in enumerate(source):
            named += [
                NamedTensor(f"{index}.{tensor.fqn}", tensor.value, tensor.kind)
                for tensor in _tensors_of_module(part, call)
            ]
    return [tensor for tensor in named if not any(fnmatch.fnmatchcase(tensor.fqn, pattern) for pattern in call.ignore)]


def _tensors_of_module(module: nn.Module, call: ModuleCall) -> Iterator[NamedTensor]:
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if call.params:
        for fqn, param in module.named_parameters():
            yield NamedTensor(canonical_fqn(fqn), param, "param")
    if call.buffers == "none":
        return
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }
    for fqn, buffer in module.named_buffers():
        if call.buffers == "all" or fqn not in transient:
            yield NamedTensor(canonical_fqn(fqn), buffer, "buffer")


def fault_of(local: Tensor) -> str | None:
    """Why this rank's memory of a tensor cannot take part, in words that follow the tensor's name."""
    if is_traceable_wrapper_subclass(local):
        return next((reason for _, inner in inner_tensors("", local) if (reason := fault_of(inner))), None)
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        return f"consists of a {type(local).__name__}, expected tensors"
    if local.is_meta:
        return "is on the meta device; give it memory with to_empty() first"
    if local.is_nested:
        return "is nested; pass the tensor of its values"
    if local.layout is not torch.strided or local.is_quantized:
        what = "quantized" if local.is_quantized else str(local.layout).removeprefix("torch.")
        return f"is {what}; convert it to a dense strided tensor first"
    if _last_byte(local) > local.untyped_storage().nbytes():
        return "spans more bytes than its storage has; was it freed or resized?"
    if local.is_conj() or local.is_neg():
        return "is a lazily conjugated or negated view; resolve it first"
    return None


def _last_byte(local: Tensor) -> int:
    if local.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return int(local.storage_offset() + last + 1) * local.element_size()


def listed_fault(fqn: str, value: Any) -> Problem | None:
    """Why a value in a list of tensors cannot be broadcast."""
    reason: str | None
    try:
        if not isinstance(value, Tensor):
            reason = f"is a {type(value).__name__}, expected a tensor"
        elif isinstance(value, DTensor):
            reason = "is a DTensor; pass its local tensor, or use sync_state_dict"
        else:
            reason = fault_of(local_tensor(value))
    except Exception as error:  # a subclass may lack these methods
        reason = f"cannot be read: {type(error).__name__}: {error}"
    return None if reason is None else Problem("cannot_sync", fqn, reason)


def inner_tensors(fqn: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory that a wrapper subclass (an fp8 weight and its scale) consists of."""
    if not is_traceable_wrapper_subclass(local):
        yield fqn, local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{fqn}.{name}", getattr(local, name))
