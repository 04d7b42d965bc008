"""Functions that ``torch.compile`` calls, but does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """``torch.compiler.disable`` as a decorator that keeps the types of what it decorates."""
    disabled: F = torch.compiler.disable(function)
    return disabled
