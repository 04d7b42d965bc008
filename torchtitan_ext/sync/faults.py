"""Why a tensor cannot be synced or compared, and the tensors with memory that one consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor


def fault_of(local: Tensor) -> str | None:
    """Why this rank's memory of a tensor cannot take part, to follow its name; ``None`` if it can."""
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
    """Why a value cannot be a member of a list of tensors to broadcast, or ``None``."""
    reason: str | None
    try:
        if not isinstance(value, Tensor):
            reason = f"is a {type(value).__name__}, expected a tensor"
        elif isinstance(value, DTensor):
            reason = "is a DTensor; pass its local tensor, or use sync_state_dict"
        else:
            reason = fault_of(local_tensor(value))
    except Exception as error:  # a subclass without what is asked of it
        reason = f"cannot be read: {type(error).__name__}: {error}"
    return None if reason is None else Problem("cannot_sync", fqn, reason)


def inner_tensors(fqn: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory that a wrapper subclass (an fp8 weight and its scale) consists of."""
    if not is_traceable_wrapper_subclass(local):
        yield fqn, local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{fqn}.{name}", getattr(local, name))
