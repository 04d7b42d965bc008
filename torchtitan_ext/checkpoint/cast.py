"""Which dtype changes keep every value, and which numbers become tensors without dims or come from them.

An explicit table: ``torch.can_cast`` and ``torch.promote_types`` both call int64 -> float32 fine, which loses bits.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from torchtitan_ext.errors import Problem, Remedy

CastPolicy = Literal["exact", "allow", "forbid"]
"""Dtype changes: those that keep every value, those that keep the kind of number, none."""

_HALF = {torch.float16, torch.bfloat16}
_FLOAT = {torch.float32, torch.float64}

EXACT_CASTS: dict[torch.dtype, frozenset[torch.dtype]] = {
    source: frozenset(targets)
    for source, targets in {
        torch.bool: {
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.uint16, torch.uint32, torch.uint64, *_HALF, *_FLOAT,
        },
        torch.uint8: {
            torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, *_HALF, *_FLOAT,
        },
        torch.int8: {torch.int16, torch.int32, torch.int64, *_HALF, *_FLOAT},
        torch.int16: {torch.int32, torch.int64, *_FLOAT},
        torch.uint16: {torch.int32, torch.int64, torch.uint32, torch.uint64, *_FLOAT},
        torch.int32: {torch.int64, torch.float64},
        torch.uint32: {torch.int64, torch.uint64, torch.float64},
        torch.float8_e4m3fn: {*_HALF, *_FLOAT},
        torch.float8_e4m3fnuz: {*_HALF, *_FLOAT},
        torch.float8_e5m2: {*_HALF, *_FLOAT},
        torch.float8_e5m2fnuz: {*_HALF, *_FLOAT},
        torch.float8_e8m0fnu: {torch.bfloat16, *_FLOAT},
        torch.float16: {*_FLOAT},
        torch.bfloat16: {*_FLOAT},
        torch.float32: {torch.float64},
        torch.complex32: {torch.complex64, torch.complex128},
        torch.complex64: {torch.complex128},
    }.items()
}  # fmt: skip


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target in EXACT_CASTS.get(source, frozenset())


def cast_problem(fqn: str, source: torch.dtype, target: torch.dtype, policy: CastPolicy) -> Problem | None:
    """Why a tensor of dtype ``source`` may not become one of dtype ``target``, or ``None`` where it may."""
    if source == target:
        return None
    found = f"saved as {source}, the target is {target}"
    if policy == "forbid":
        detail = f"{found}: cast='forbid' allows no change of dtype; use a target of the saved dtype"
        return Problem("wrong_dtype", fqn, detail)
    if is_exact(source, target):
        return None
    if _kind(source) > _kind(target):
        return Problem("wrong_dtype", fqn, f"{found}: the kind of number would change; convert it yourself")
    if policy == "allow":
        return None
    advice = "; pass cast='allow' to accept that"
    return Problem("wrong_dtype", fqn, f"{found}: values can change", advice, Remedy("cast", "allow"))


def number_for(value: Any, dtype: torch.dtype, policy: CastPolicy) -> int | float | complex:
    """The number that a tensor without dims is filled with, where a checkpoint has a number in its place.

    A float has no dtype of its own: it becomes what ``torch.tensor(value, dtype=dtype)`` makes of it in float32 and
    float64. Integers, and floats in narrower dtypes, must be kept exactly.

    Raises:
        ValueError: It is no number, or the tensor would hold another one.
    """
    if not isinstance(value, (bool, int, float, complex)):
        raise ValueError(
            f"it is a {type(value).__name__}, the target is a tensor; put a target of the saved kind there"
        )
    kind = next(kind for kind, numbers in enumerate((bool, int, float, complex)) if isinstance(value, numbers))
    if kind == _kind(dtype) or (kind < _kind(dtype) and policy != "forbid"):
        kept = _in_dtype(value, dtype)
        is_rounded_well = kind == 2 and (dtype in _FLOAT or policy == "allow") and not math.isinf(abs(kept))
        if kept == value or value != value or is_rounded_well:
            return kept
    raise ValueError(f"it is {value!r}, the target is a tensor of {dtype}, which cannot hold that number")


def _in_dtype(value: complex, dtype: torch.dtype) -> int | float | complex:
    """What a tensor of a dtype holds for a number, infinity where it is out of range."""
    try:
        number: int | float | complex = torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError):
        return math.inf
    return number


def number_from(tensor: torch.Tensor, kind: type) -> int | float | bool:
    """The number of class ``kind`` in a tensor without dims.

    Raises:
        ValueError: There is no such number.
    """
    value = tensor.item()
    if isinstance(value, bool) == (kind is bool) and not isinstance(value, complex):
        if kind is float or math.isfinite(value):
            number = kind(value)
            if number == value or value != value:
                return number
    raise ValueError(f"it is a tensor with {value!r}, the target is a {kind.__name__}, which cannot be that number")


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1
