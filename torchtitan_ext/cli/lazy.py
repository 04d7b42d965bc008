"""Modules that need torch. Each is imported when a command first uses it, so that help and wrong usages do not wait.

Imports run without Python's garbage collector.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        with without_collector():
            return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    from torchtitan_ext.checkpoint.rules import policy as policy
    from torchtitan_ext.offline import placement_rules as placement_rules
    from torchtitan_ext.offline import selection as selection
    from torchtitan_ext.offline import sources as sources
    from torchtitan_ext.offline.compare import delta_file as delta_file
    from torchtitan_ext.offline.compare import diff as diff
    from torchtitan_ext.offline.compare import fingerprints as fingerprints
    from torchtitan_ext.offline.dry_run import run as run
    from torchtitan_ext.offline.rewrite import convert as convert
    from torchtitan_ext.offline.rewrite import reshard as reshard
    from torchtitan_ext.storage import raw_tensor as raw_tensor
    from torchtitan_ext.transforms import rules as rules
else:
    policy = _LazyModule("torchtitan_ext.checkpoint.rules.policy")
    placement_rules = _LazyModule("torchtitan_ext.offline.placement_rules")
    selection = _LazyModule("torchtitan_ext.offline.selection")
    sources = _LazyModule("torchtitan_ext.offline.sources")
    delta_file = _LazyModule("torchtitan_ext.offline.compare.delta_file")
    diff = _LazyModule("torchtitan_ext.offline.compare.diff")
    fingerprints = _LazyModule("torchtitan_ext.offline.compare.fingerprints")
    run = _LazyModule("torchtitan_ext.offline.dry_run.run")
    convert = _LazyModule("torchtitan_ext.offline.rewrite.convert")
    reshard = _LazyModule("torchtitan_ext.offline.rewrite.reshard")
    raw_tensor = _LazyModule("torchtitan_ext.storage.raw_tensor")
    rules = _LazyModule("torchtitan_ext.transforms.rules")


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
