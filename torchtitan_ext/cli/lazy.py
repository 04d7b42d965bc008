"""Imports that wait until they are needed, and run without Python's garbage collector.

The help of a command need not wait for torch.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        with without_collector():
            return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """A stand-in for a module. Where types are checked the module itself is imported under its name instead."""
    return _LazyModule(name)


@contextmanager
def without_collector() -> Iterator[None]:
    """Imports and a hundred thousand keys are no garbage: looking through them again and again takes time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
