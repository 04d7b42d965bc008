"""The contents of a checkpoint of any format in plain values: keys, files, versions. Imports no torch.

``storage/inspect/describe.py`` makes the ``Contents`` of a path.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_ext._core import ChunkSummary, KeySummary
from torchtitan_ext.storage.element_types import ITEM_BYTES, num_bytes_of
from torchtitan_ext.storage.formats.detect import Format
from torchtitan_ext.storage.location import Place

Scalar = bool | int | float | complex | str | None
"""A single value that a table can show."""

MODEL = "model"
"""The component to which tensors at the top of a state dict belong."""


class ContentFile(NamedTuple):
    """One data file.

    Attributes:
        num_bytes: Size of the file; ``None`` if it is missing.
        num_records: Number of chunks and values in the file.
        save_id: The id of the earlier save that wrote the file; ``None`` for a file of the checkpoint's own save.
    """

    name: str
    num_bytes: int | None
    num_records: int
    save_id: str | None = None


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, from its metadata. Unknown fields are empty.

    Only ``read_values`` and ``read_records`` read data.

    Attributes:
        keys: All keys in the order of the checkpoint.
        chunks_of: Returns the chunks of a key.
        read_values: Returns the values of those of the given keys that are single numbers or texts.
        paths: The path of each key in the nested state dict.
        read_records: Returns the values of the given keys of a DCP checkpoint; see ``plain_records``.
        has_checksums: Whether there is an index of ours with checksums of all bytes.
        save_id: The id of the save that wrote the checkpoint.
        step: The step in the name of the directory.
        world_size: The number of ranks that saved.
        mesh: Size of each named mesh axis of these ranks.
        versions: The versions of ``torch``, ``torchtitan_ext`` and the format (``dcp``).
    """

    path: Place
    format: Format
    keys: Sequence[KeySummary]
    files: Sequence[ContentFile]
    chunks_of: Callable[[str], Sequence[ChunkSummary]]
    read_values: Callable[[Sequence[KeySummary]], Mapping[str, Scalar]] = lambda keys: {}
    paths: Mapping[str, Sequence[object]] = field(default_factory=dict)
    read_records: Callable[[Sequence[str]], Mapping[str, Any]] = lambda fqns: {}
    has_checksums: bool = False
    save_id: str | None = None
    step: int | None = None
    world_size: int | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def components(self) -> dict[str, list[KeySummary]]:
        """The keys of each top-level key of the state dict; tensors at its top make up the component ``model``."""
        found: dict[str, list[KeySummary]] = {}
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

    def matching(self, pattern: str | None) -> list[KeySummary]:
        """The keys whose names match a shell pattern (``fnmatch``); without a pattern all keys."""
        if pattern is None:
            return list(self.keys)
        names = set(fnmatch.filter([key.fqn for key in self.keys], pattern))
        return [key for key in self.keys if key.fqn in names]


def bytes_of(dtype: str, sizes: Sequence[int], stored_bytes: int) -> int:
    """The size of a tensor's elements; for a dtype that is no plain memory the size of its records."""
    return num_bytes_of(dtype, sizes) if dtype in ITEM_BYTES else stored_bytes
