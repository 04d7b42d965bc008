"""Which changes of dtype keep every value: an explicit table.

``torch.can_cast`` and ``torch.promote_types`` both allow int64 -> float32, which loses bits.
"""

from __future__ import annotations

from typing import Literal

import torch

from torchtitan_ext.errors import Problem, Remedy

CastPolicy = Literal["exact", "allow", "forbid"]
"""Dtype changes: those that keep every value, those that keep the kind of number, none."""

_HALF = {torch.float16, torch.bfloat16}
FLOATS = {torch.float32, torch.float64}

EXACT_CASTS: dict[torch.dtype, frozenset[torch.dtype]] = {
    source: frozenset(targets)
    for source, targets in {
        torch.bool: {
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.uint16, torch.uint32, torch.uint64, *_HALF, *FLOATS,
        },
        torch.uint8: {
            torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, *_HALF, *FLOATS,
        },
        torch.int8: {torch.int16, torch.int32, torch.int64, *_HALF, *FLOATS},
        torch.int16: {torch.int32, torch.int64, *FLOATS},
        torch.uint16: {torch.int32, torch.int64, torch.uint32, torch.uint64, *FLOATS},
        torch.int32: {torch.int64, torch.float64},
        torch.uint32: {torch.int64, torch.uint64, torch.float64},
        torch.float8_e4m3fn: {*_HALF, *FLOATS},
        torch.float8_e4m3fnuz: {*_HALF, *FLOATS},
        torch.float8_e5m2: {*_HALF, *FLOATS},
        torch.float8_e5m2fnuz: {*_HALF, *FLOATS},
        torch.float8_e8m0fnu: {torch.bfloat16, *FLOATS},
        torch.float16: {*FLOATS},
        torch.bfloat16: {*FLOATS},
        torch.float32: {torch.float64},
        torch.complex32: {torch.complex64, torch.complex128},
        torch.complex64: {torch.complex128},
    }.items()
}  # fmt: skip


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target in EXACT_CASTS.get(source, frozenset())


def cast_problem(
    fqn: str, source: torch.dtype, target: torch.dtype, policy: CastPolicy, *, has: str = "saved as"
) -> Problem | None:
    """Why the policy forbids a cast from ``source`` to ``target``; ``None`` where it allows it.

    ``has`` says of the source that it has its dtype.
    """
    if source == target:
        return None
    found = f"{has} {source}, the target is {target}"
    if policy == "forbid":
        detail = f"{found}: cast='forbid' allows no change of dtype; use a target of that dtype"
        return Problem("wrong_dtype", fqn, detail)
    if is_exact(source, target):
        return None
    if kind_of_number(source) > kind_of_number(target):
        return Problem("wrong_dtype", fqn, f"{found}: the kind of number would change; convert it yourself")
    if policy == "allow":
        return None
    advice = "; pass cast='allow' to accept that"
    return Problem("wrong_dtype", fqn, f"{found}: values can change", advice, Remedy("cast", "allow"))


def kind_of_number(dtype: torch.dtype) -> int:
    """0 of bools, 1 of integers, 2 of floats, 3 of complex numbers."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1
