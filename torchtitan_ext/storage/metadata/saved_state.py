"""What a checkpoint of any format holds, by its metadata alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.world import World
from torchtitan_ext.storage.element_types import num_bytes_of
from torchtitan_ext.storage.metadata.saved_metadata import DCP_VERSION, recorded_paths, recorded_world

KeyPath = tuple[str | int, ...]
"""Where a value stands in the nested state dict: keys of dicts, positions in lists."""

# A damaged file may lose more than anyone wants to read of.
_MAX_LOST = 1 << 16


class ChunkKey(NamedTuple):
    """A chunk of a tensor, or a value, by the names of DCP's ``MetadataIndex``.

    Attributes:
        offset: Where the chunk begins in its tensor; ``None`` of a value.
    """

    fqn: str
    offset: tuple[int, ...] | None = None


class SavedTensor(NamedTuple):
    """A tensor as a checkpoint describes it.

    Attributes:
        dtype: The name in torch, without the module.
        chunks: The chunks in which it was saved; tensors with equal lists share the object.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: _core.ChunkIndex

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)

    def chunk_keys(self, fqn: str) -> list[ChunkKey]:
        return [ChunkKey(fqn, offsets) for offsets, _ in self.chunks.boxes()]


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds.

    Attributes:
        entries: Every flat key, in the order of the checkpoint; ``None`` for a value that is no tensor.
        planner_data: As DCP has it: the path of each key in the nested state dict, and notes. May contain anything.
    """

    entries: Mapping[str, SavedTensor | None]
    planner_data: Any

    @cached_property
    def tensors(self) -> dict[str, SavedTensor]:
        return {fqn: entry for fqn, entry in self.entries.items() if entry is not None}

    @property
    def world(self) -> World:
        """The world that saved; of size 0 where nothing says it."""
        return recorded_world(self.planner_data) or World(0)

    def paths(self) -> dict[str, KeyPath]:
        """The path of each key in the nested state dict; a key without a noted path stands at the top."""
        at_the_top: dict[str, KeyPath] = {fqn: (fqn,) for fqn in self.entries}
        return at_the_top | recorded_paths(self.planner_data, self.entries)


def state_in(columns: _core.MetadataColumns, planner_data: Any) -> SavedState:
    """What the metadata of a DCP checkpoint describes."""
    chunks = _core.SavedChunks(columns)
    entries: dict[str, SavedTensor | None] = {}
    for number, fqn in enumerate(columns.names_of_keys()):
        key, of_key = columns.key(number), chunks.find(fqn)
        entries[fqn] = None if key is None or of_key is None else SavedTensor(key.dtype, key.sizes, of_key)
    return SavedState(entries, planner_data)


def lost_problems(columns: _core.MetadataColumns, state: SavedState) -> list[Problem]:
    """Problems of keys with a chunk, or a value, for which the metadata names no file."""
    lost: dict[str, int] = {}
    for part in columns.unplaced_chunks(_MAX_LOST):
        lost[part.fqn] = lost.get(part.fqn, 0) + 1
    entries = {fqn: state.entries[fqn] for fqn in sorted(lost)}
    return [lost_problem(fqn, lost[fqn], 1 if one is None else len(one.chunks)) for fqn, one in entries.items()]


def lost_problem(fqn: str, num_lost: int, num_parts: int) -> Problem:
    detail = f"{num_lost} of its {num_parts} part(s) are in no file of the checkpoint; load another checkpoint"
    return Problem("broken_checkpoint", fqn, detail)


def version_problems(version: str | None) -> list[Problem]:
    """The problem of a newer version of DCP's format than this one."""
    if version is None or _numbers(version) <= _numbers(DCP_VERSION):
        return []
    detail = f"has format version {version}, this torchtitan_ext reads up to {DCP_VERSION}; load it with a newer one"
    return [Problem("broken_checkpoint", "checkpoint", detail)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
