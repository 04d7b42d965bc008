"""What any checkpoint holds, in plain values: its keys, its files, and who wrote it. Imports no torch.

``describe`` (describe.py) makes a ``Contents`` of whatever lies at a path.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchtitan_ext.storage.element_types import ITEM_BYTES, num_bytes_of
from torchtitan_ext.storage.formats.detect import Format

Scalar = bool | int | float | complex | str | None
"""A value for a cell of a table."""

MODEL = "model"
"""What tensors at the top of a state dict are together."""


class ContentKey(NamedTuple):
    """One key of a checkpoint.

    Attributes:
        dtype: As torch calls it, without the module; ``None`` of what is no tensor.
        sizes: Global; ``None`` of what is no tensor.
        num_bytes: Of the elements; of other values those of their records, 0 where they have none of their own.
        num_chunks: Records that it lies in.
    """

    fqn: str
    dtype: str | None
    sizes: tuple[int, ...] | None
    num_bytes: int
    num_chunks: int


class ContentChunk(NamedTuple):
    """Where one chunk of a key lies.

    Attributes:
        offsets: Of its first element in the tensor; ``None`` of what is no tensor, like ``sizes``.
        file: Relative to the checkpoint; ``None`` where the checkpoint does not say where it lies.
        offset: Byte of the file at which its record begins; ``None`` where that is not known.
    """

    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    file: str | None
    offset: int | None
    num_bytes: int | None


class ContentFile(NamedTuple):
    """One data file.

    Attributes:
        num_bytes: Its size; ``None`` where it is not there.
        num_records: How many chunks and other values lie in it.
    """

    name: str
    num_bytes: int | None
    num_records: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says of itself. Nothing of its data was read, but by ``read_values``.

    Attributes:
        keys: In the order of the checkpoint.
        chunks_of: The chunks of a key, by its name.
        read_values: The values of single numbers and texts among some keys, by name; of others there is none.
        paths: Where a key stands in the nested state dict, as far as the checkpoint says.
        has_checksums: Whether there is an index of ours with checksums of all bytes.
        save_id: Of the save that wrote it; ``None`` where it had none.
        step: By the name of the directory; ``None`` where it has another name.
        world_size: How many ranks saved it; ``None`` where it does not say.
        mesh: Size of each named mesh axis of the ranks that saved it; empty where it does not say.
        versions: Of ``torch``, ``torchtitan_ext`` and the format (``dcp``), as far as it says.
    """

    path: Path
    format: Format
    keys: Sequence[ContentKey]
    files: Sequence[ContentFile]
    chunks_of: Callable[[str], Sequence[ContentChunk]]
    read_values: Callable[[Sequence[ContentKey]], Mapping[str, Scalar]] = lambda keys: {}
    paths: Mapping[str, Sequence[object]] = field(default_factory=dict)
    has_checksums: bool = False
    save_id: str | None = None
    step: int | None = None
    world_size: int | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def components(self) -> dict[str, list[ContentKey]]:
        """The keys of each top-level key of the state dict; tensors at its top make up the component ``model``."""
        found: dict[str, list[ContentKey]] = {}
        nested = {key.fqn: top for key in self.keys if (top := self._top_of(key.fqn)) is not None}
        has_own_model = MODEL in nested.values()
        for key in self.keys:
            at_top = key.fqn if key.dtype is None or has_own_model else MODEL
            found.setdefault(nested.get(key.fqn, at_top), []).append(key)
        return found

    def _top_of(self, fqn: str) -> str | None:
        path = self.paths.get(fqn)
        is_nested = isinstance(path, (tuple, list)) and len(path) > 1 and fqn.startswith(f"{path[0]}.")
        return str(path[0]) if path is not None and is_nested else None

    def matching(self, pattern: str | None) -> list[ContentKey]:
        """The keys whose names match a shell pattern, as ``fnmatch`` reads it; all without one."""
        if pattern is None:
            return list(self.keys)
        names = set(fnmatch.filter([key.fqn for key in self.keys], pattern))
        return [key for key in self.keys if key.fqn in names]


def bytes_of(dtype: str, sizes: Sequence[int], stored_bytes: int) -> int:
    """The bytes of a tensor's elements; of dtypes that are no plain memory those of its records."""
    return num_bytes_of(dtype, sizes) if dtype in ITEM_BYTES else stored_bytes


def size_of(path: Path) -> int | None:
    """The size of a file; ``None`` where there is none, or can be none of this name."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None
