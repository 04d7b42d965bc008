"""Modules that are imported when something of them is used: the help of a command need not wait for torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from torchtitan_ext.cli.collector import without_collector


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        with without_collector():
            return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """A stand-in for a module. Where types are checked the module itself is imported under its name instead."""
    return _LazyModule(name)
