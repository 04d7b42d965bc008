"""The dtypes that the native reader casts, and how to compare what torch made of them."""

import torch

FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
TARGETS = FLOATS[2:]


def without_nan(values: torch.Tensor) -> torch.Tensor:
    """A copy in which each NaN is the same one."""
    return values.clone().masked_fill_(values.isnan(), torch.nan)
