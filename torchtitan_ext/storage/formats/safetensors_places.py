"""Where the tensors of safetensors files lie, in existing files and in new ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import Record, StoredTensor, row_major_strides
from torchtitan_ext.storage.element_types import ITEM_BYTES, num_bytes_of
from torchtitan_ext.storage.formats.safetensors_files import (
    NAME_OF_DTYPE,
    find_weight_map,
    read_header,
    read_weight_map,
    safetensors_paths,
)

INDEX_NAME = "model.safetensors.index.json"
"""The file that names the file of each tensor of a directory."""

Place = tuple[tuple[int, ...], Record]
"""The offsets of a chunk in its tensor, and its record."""


def find_safetensors(path: Path) -> dict[str, list[Place]]:
    """The chunks of each tensor of a file or a directory; reads headers only.

    Reads the files that the index of a directory names, or all files without an index.

    Raises:
        DamagedCheckpointError: A header is damaged; files lack tensors of the index, or it names files elsewhere.
        OSError: A file cannot be read.
    """
    index = find_weight_map(path)
    weight_map = None if index is None else read_weight_map(index)
    names = {file.name for file in safetensors_paths(path)} if weight_map is None else set(weight_map.values())
    directory = path if path.is_dir() else path.parent
    found: dict[str, list[Place]] = {}
    for name in sorted(names):
        for fqn, entry in read_header(directory / name).items():
            if entry.dtype not in ITEM_BYTES:
                raise DamagedCheckpointError(
                    f"{directory / name}: {fqn} is {entry.dtype}, which torch has no dtype for"
                )
            if weight_map is None or weight_map.get(fqn) == name:
                stored = StoredTensor(entry.dtype, entry.sizes, row_major_strides(entry.sizes), entry.begin)
                record = Record(name, entry.begin, entry.num_bytes, stored)
                found.setdefault(fqn, []).append((entry.offsets, record))
    for fqn, places in found.items():
        kinds = {(record.tensor.dtype, len(offsets)) for offsets, record in places if record.tensor is not None}
        if len(kinds) > 1:
            raise DamagedCheckpointError(f"{path}: the chunks of {fqn} are of several dtypes, or of other dims")
    lost = sorted((weight_map or {}).keys() - found.keys())
    if lost:
        raise DamagedCheckpointError(
            f"{path}: {len(lost)} tensor(s) of its index are not in their files, for example {lost[0]}"
        )
    return found


def index_of(weight_map: Mapping[str, str], num_bytes: int) -> bytes:
    """The index of a directory, from the file of each tensor and the bytes of all."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()


@dataclass(frozen=True)
class NewSafetensors:
    """A file that is to be written.

    Attributes:
        header: The first bytes of the file.
        offsets: First byte of each tensor in the file; tensors lie in this order, without gaps.
    """

    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def lay_out(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> NewSafetensors:
    """A file for tensors of these dtypes and shapes. Larger elements come first, so that all are aligned."""
    by_size = sorted(tensors, key=lambda fqn: (-ITEM_BYTES[tensors[fqn][0]], fqn))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for fqn in by_size:
        dtype, sizes = tensors[fqn]
        begins[fqn], end = end, end + num_bytes_of(dtype, sizes)
        entries[fqn] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(sizes), "data_offsets": [begins[fqn], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return NewSafetensors(header, {fqn: start + begin for fqn, begin in begins.items()}, start + end)
