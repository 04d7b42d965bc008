"""Which dtype changes keep every value.

An explicit table: ``torch.can_cast`` and ``torch.promote_types`` both call int64 -> float32 fine, which loses bits.
"""

from __future__ import annotations

from typing import Literal

import torch

from torchtitan_ext.errors import Problem

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
    if policy == "forbid":
        reason = "cast='forbid' allows no change of dtype; use a target of the saved dtype"
    elif is_exact(source, target):
        return None
    elif _kind(source) > _kind(target):
        reason = "the kind of number would change; convert it yourself"
    elif policy == "allow":
        return None
    else:
        reason = "values can change; pass cast='allow' to accept that"
    return Problem("wrong_dtype", fqn, f"saved as {source}, the target is {target}: {reason}")


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1
