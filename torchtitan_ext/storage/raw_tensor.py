"""Which tensors are plain memory, so that their bytes can be written and read as they are, and what torch calls these.

All others (subclasses, sparse, quantised) travel as whole ``torch.save`` records.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchtitan_ext import _core

# Names in pickles: torch.save has a storage class for each of the older dtypes and writes the name of the younger ones.
_STORAGE_CLASSES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}
_YOUNGER = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
UNTYPED = "UntypedStorage"

_DTYPE_OF_CLASS = {name: dtype for dtype, name in _STORAGE_CLASSES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


ELEMENT_TYPES = {
    **{dtype: _core.ElementType(name, "", dtype.itemsize) for dtype, name in _STORAGE_CLASSES.items()},
    **{dtype: _core.ElementType(UNTYPED, dtype_name(dtype), dtype.itemsize) for dtype in _YOUNGER},
}
NAMES = {dtype: dtype_name(dtype) for dtype in ELEMENT_TYPES}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def dtype_of(storage_class: str, name: str) -> torch.dtype | None:
    """The dtype that a pickle means; ``None`` where it is none of plain memory."""
    return DTYPES.get(name) if storage_class == UNTYPED else _DTYPE_OF_CLASS.get(storage_class)


def raw_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself where its elements lie as they are in memory, a copy where they are conjugated or negated.

    Args:
        tensor: Detached, on any device but meta.

    Returns:
        A strided ``torch.Tensor`` of a dtype of ``ELEMENT_TYPES``; ``None`` where there is no such memory.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.dtype not in ELEMENT_TYPES:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


class Staging:
    """A kept buffer on the host through which tensors of other devices pass, a part at a time.

    Args:
        num_bytes: Of the buffer. Pinned where there is a CUDA device, so that copies need no second buffer.
    """

    def __init__(self, num_bytes: int = 64 << 20) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def copy_out(self, tensor: torch.Tensor, write: Callable[[int, int], None]) -> None:
        """Calls ``write(address, num_bytes)`` for all bytes of a tensor, in row-major order.

        What lies at the address is gone after the call.
        """
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for part in flat.split(self._buffer.numel()):
            staged = self._buffer[: part.numel()]
            staged.copy_(part)
            write(staged.data_ptr(), staged.numel())
