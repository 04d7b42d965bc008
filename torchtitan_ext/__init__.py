"""State that survives a change of cluster: exact distributed checkpoints, resharding and replica sync for PyTorch.

Names are imported when they are first used (PEP 562), so that ``torchtitan_ext.errors`` and ``torchtitan_ext._core``
come in a fraction of a second, and without torch. Where torch is imported already, the operators are registered at once
(20 ms): ``torch.ops.torchtitan_ext`` is there, and saved programs that use it load.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_ext import checkpoint as checkpoint
    from torchtitan_ext import elastic as elastic
    from torchtitan_ext import errors as errors
    from torchtitan_ext import full as full
    from torchtitan_ext import integrations as integrations
    from torchtitan_ext import layout as layout
    from torchtitan_ext import ops as ops
    from torchtitan_ext import ranks as ranks
    from torchtitan_ext import runs as runs
    from torchtitan_ext import state as state
    from torchtitan_ext import storage as storage
    from torchtitan_ext import sync as sync
    from torchtitan_ext import transfer as transfer
    from torchtitan_ext import transforms as transforms
    from torchtitan_ext import weights as weights
    from torchtitan_ext.checkpoint import LoadPlanner, SavePlanner, async_save, load, save
    from torchtitan_ext.fingerprints import fingerprint
    from torchtitan_ext.full.tensors import full_tensor
    from torchtitan_ext.integrations.install import install
    from torchtitan_ext.offline.dry_run.run import dry_run
    from torchtitan_ext.runs import CheckpointManager
    from torchtitan_ext.state.flat_buffer import flatten_state_dict, unflatten_state_dict
    from torchtitan_ext.storage import FileReader, FileWriter, latest
    from torchtitan_ext.sync import sync_module_states
    from torchtitan_ext.sync.check import check_replicas
    from torchtitan_ext.transfer import reshard

__version__ = "0.3.0"

__all__ = [
    "CheckpointManager",
    "FileReader",
    "FileWriter",
    "LoadPlanner",
    "SavePlanner",
    "async_save",
    "check_replicas",
    "dry_run",
    "fingerprint",
    "flatten_state_dict",
    "full_tensor",
    "install",
    "latest",
    "load",
    "reshard",
    "save",
    "sync_module_states",
    "unflatten_state_dict",
]

# Rooms that are reached by attribute too, as after ``import torchtitan_ext.sync``.
_ROOMS = (
    *("checkpoint", "elastic", "errors", "full", "integrations", "layout", "ops", "ranks", "runs", "state"),
    *("storage", "sync", "transfer", "transforms", "weights"),
)

_MODULE_OF = {
    "CheckpointManager": "runs",
    **dict.fromkeys(("LoadPlanner", "SavePlanner", "async_save", "load", "save"), "checkpoint"),
    "full_tensor": "full.tensors",
    "sync_module_states": "sync",
    "check_replicas": "sync.check",
    **dict.fromkeys(("FileReader", "FileWriter", "latest"), "storage"),
    "install": "integrations.install",
    "reshard": "transfer",
    **dict.fromkeys(("flatten_state_dict", "unflatten_state_dict"), "state.flat_buffer"),
    "dry_run": "offline.dry_run.run",
    "fingerprint": "fingerprints",
}


# A type checker that sees it takes any name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__ and name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"torchtitan_ext.{name} needs torch 2.11 or newer; run: pip install torch") from None
        value = getattr(module, name) if name in _MODULE_OF else module
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, "__version__"})


if "torch" in sys.modules:
    try:
        importlib.import_module(f"{__name__}.ops")
    except ImportError:
        pass  # a torch beside which the operators do not load: names that need them say so
