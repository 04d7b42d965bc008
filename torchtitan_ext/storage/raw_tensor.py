"""Which tensors are plain memory, so that their bytes can be written and read as they are.

All others (subclasses, sparse, quantised) travel as whole ``torch.save`` records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_ext.storage import element_types

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in element_types.ELEMENT_TYPES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ELEMENT_TYPES = {dtype: element_types.ELEMENT_TYPES[name] for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor whose memory holds the elements: the given tensor, or a copy if that is conjugated or negated.

    Args:
        tensor: Detached, on any device but meta.

    Returns:
        A strided ``torch.Tensor`` of a dtype of ``ELEMENT_TYPES``; ``None`` if the tensor is no plain memory.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.dtype not in ELEMENT_TYPES:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def converted(
    values: torch.Tensor, scales: torch.Tensor | None, dtypes: Sequence[torch.dtype], wanted: torch.dtype
) -> torch.Tensor:
    """Saved elements times their scales, cast to dtypes in turn. The last cast is left out where the copy into a target
    of the wanted dtype makes it."""
    if dtypes and dtypes[-1] == wanted and scales is None:
        dtypes = dtypes[:-1]
    if scales is not None:
        values = values.to(torch.float32) * scales.to(torch.float32)
    for dtype in dtypes:
        values = values.to(dtype)
    return values
