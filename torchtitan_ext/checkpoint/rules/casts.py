"""Which changes of dtype a load makes."""

from __future__ import annotations

from typing import Literal

import torch

from torchtitan_ext.errors import Problem, Remedy
from torchtitan_ext.storage.element_types import is_exact_cast
from torchtitan_ext.storage.raw_tensor import dtype_name

CastPolicy = Literal["exact", "allow", "forbid"]
"""Dtype changes: those that keep every value, those that keep the kind of number, none."""

FLOATS = {torch.float32, torch.float64}


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return is_exact_cast(dtype_name(source), dtype_name(target))


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
