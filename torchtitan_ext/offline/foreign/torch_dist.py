"""Megatron-Core's ``torch_dist``: a checkpoint of DCP, beside it ``common.pt`` with what no rank has a part of.

``metadata.json`` names the format, and whether there is a ``common.pt``: newer versions have all in DCP. Sharded
objects stay values under the keys that Megatron gives them, such as ``rng_state/shard_0_2``. Written by
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/strategies/torch.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.offline.sources import DcpSource
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.torch_files import read_torch_file
from torchtitan_ext.storage.metadata.saved_state import SavedState
from torchtitan_ext.storage.native.open_files import Chunk

# The distributed optimizer in forms that follow its buckets, whose cut depends on ranks and sizes that no file tells.
_BOUND = re.compile(r".*\.dp_group_idx_\d+\.(gbuf_idx_\d+\..*|param_state)(/shard_.*)?")


def read(directory: Path, *, weights_only: bool) -> TorchDistFiles:
    """The checkpoint in a directory.

    Raises:
        DamagedCheckpointError: Metadata or ``common.pt`` are damaged.
        UnsafePickleError: ``common.pt`` names a class that may not be unpickled.
        ReshardError: A key is in both.
    """
    return TorchDistFiles(directory, weights_only=weights_only)


class TorchDistFiles(DcpSource):
    """The tensors and objects of the directory, and the values of ``common.pt`` under their own keys."""

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        super().__init__(path, weights_only=weights_only)
        common_path = path / "common.pt"
        is_said = '"common_backend"' in (path / "metadata.json").read_text(errors="replace")
        self._common = PlainFiles(path, {}, {}, {})
        if is_said or common_path.exists():
            self._common = read_torch_file(common_path, weights_only=weights_only)
        common = self._common.state
        both = sorted(self.state.entries.keys() & common.entries.keys())
        if both:
            problems = [Problem("broken_checkpoint", key, "is in common.pt too; remove it there") for key in both]
            raise refusal("open", problems)
        paths = self.state.planner_data if isinstance(self.state.planner_data, dict) else {}
        self.state = SavedState({**self.state.entries, **common.entries}, {**paths, **common.paths()})

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises ReshardError for keys that are bound to the world that saved them, and what DcpSource raises."""
        own = [fqn for fqn in fqns if fqn not in self._common.state.entries]
        detail = (
            "follows the buckets of the ranks that saved it: save once with --dist-ckpt-optim-fully-reshardable, or "
            "leave it out"
        )
        problems = [Problem("cannot_reshard", fqn, detail) for fqn in own if _BOUND.fullmatch(fqn)]
        if problems:
            raise refusal("open", problems)
        super().check_files(own)

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        common = self._common.state.entries
        own = iter(super().find_records([key for key in keys if key.fqn not in common]))
        return [self._common.find_records([key])[0] if key.fqn in common else next(own) for key in keys]

    def read_value(self, fqn: str) -> Any:
        return self._common.read_value(fqn) if fqn in self._common.values else super().read_value(fqn)

    def value_record(self, fqn: str) -> npt.NDArray[np.uint8]:
        return self._common.value_record(fqn) if fqn in self._common.values else super().value_record(fqn)
