"""Modules that need torch. Each is imported when a command first uses it, so that help and wrong usages do not wait.

Imports run without Python's garbage collector.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_ext.checkpoint.rules import policy as policy
    from torchtitan_ext.offline import mapped_files as mapped_files
    from torchtitan_ext.offline import placement_rules as placement_rules
    from torchtitan_ext.offline import selection as selection
    from torchtitan_ext.offline import sources as sources
    from torchtitan_ext.offline.compare import diff as diff
    from torchtitan_ext.offline.compare import fingerprints as fingerprints
    from torchtitan_ext.offline.dry_run import run as run
    from torchtitan_ext.offline.rewrite import convert as convert
    from torchtitan_ext.offline.rewrite import misdescribed as misdescribed
    from torchtitan_ext.offline.rewrite import reshard as reshard
    from torchtitan_ext.transforms import rules as rules
_MODULES = (
    "checkpoint.rules.policy",
    "offline.mapped_files",
    "offline.placement_rules",
    "offline.selection",
    "offline.sources",
    "offline.compare.diff",
    "offline.compare.fingerprints",
    "offline.dry_run.run",
    "offline.rewrite.misdescribed",
    "offline.rewrite.convert",
    "offline.rewrite.reshard",
    "transforms.rules",
)


def __getattr__(name: str) -> Any:
    for module in _MODULES:
        if module.endswith(f".{name}"):
            with without_collector():
                return importlib.import_module(f"torchtitan_ext.{module}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off: searching imports and a hundred thousand keys for garbage again and again takes time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
