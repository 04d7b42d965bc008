"""Whether a checkpoint is whole: every file there, of its size and its save, and every byte as it was written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, TorchtitanExtError
from torchtitan_ext.storage.checkpoint_files import parse_index
from torchtitan_ext.storage.file_reader import FileReader
from torchtitan_ext.storage.opened import OpenedCheckpoint

# What is read at a time: a multiple of the blocks that have checksums.
_READ_BYTES = 16 << 20


def find_damage(path: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with a checkpoint: reads all bytes of the files that fall to one of several parts.

    Returns:
        ``None`` where nothing is; files of stock DCP have no checksums: their sizes are looked at.
    """
    reader = FileReader(path, "all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of checksums that stock's checkpoints do not have
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=False)
        ends: dict[str, int] = {}
        for info in reader.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name in sorted(ends)[part::num_parts]:
            _check_file(reader, name, ends[name])
    except TorchtitanExtError as error:
        return error.reason if isinstance(error, DamagedCheckpointError) else str(error)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there, of their sizes, and belong together; reads none of the data."""
    try:
        opened = OpenedCheckpoint(path)
        try:
            metadata: bytes | None = opened.read_metadata(None)
        except FileNotFoundError:
            metadata = None
        # The name of an index in place needs the id in the metadata; one of another save does not match it.
        place, content = opened.read_index(None, None)
        index = None if content is None else parse_index(place, content, metadata, verify="all")
        if index is None:
            return find_damage(path) is None
        return all(
            os.fstat(opened.descriptor(name)).st_size == file.file.num_bytes for name, file in index.files.items()
        )
    except (TorchtitanExtError, OSError, ValueError):
        return False


def _check_file(reader: FileReader, name: str, num_bytes: int) -> None:
    runs = _core.RunReader()
    try:
        file = reader.open_file(runs, name)
    except _core.FormatError as error:
        raise DamagedCheckpointError(str(error)) from None
    if os.fstat(reader.files.descriptor(name)).st_size < num_bytes:
        raise DamagedCheckpointError(f"{reader.path / name} ends before its last record, at byte {num_bytes}")
    if not reader.has_checksums(name):
        return
    buffer = torch.empty(min(num_bytes, _READ_BYTES), dtype=torch.uint8)
    for begin in range(0, num_bytes, _READ_BYTES):
        runs.add_bytes(file, begin, min(_READ_BYTES, num_bytes - begin), buffer.data_ptr())
        reader.read_runs(runs, [name])
