"""Checkpoint files at the speed of the disk: a DCP StorageWriter and StorageReader over csrc/storage.

Names are imported when they are first used (PEP 562): describing and verifying a checkpoint need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_ext.storage.native.file_reader import FileReader
    from torchtitan_ext.storage.native.file_writer import FileWriter
    from torchtitan_ext.storage.runs.retention import latest
    from torchtitan_ext.storage.weights.writer import SafetensorsWriter

__all__ = ["FileReader", "FileWriter", "SafetensorsWriter", "latest"]

_MODULE_OF = {
    "FileReader": "native.file_reader",
    "FileWriter": "native.file_writer",
    "SafetensorsWriter": "weights.writer",
    "latest": "runs.retention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
