"""The files of a checkpoint's directory: their names, how the index says what lies where, and threads to read them by.

``.metadata`` and ``__<rank>_0.distcp`` are DCP's; ``.tte_index`` is ours (docs/format.md). With
``use_collectives=False`` each rank has metadata, and an index, of its own.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.element_types import ITEM_BYTES

DATA_SUFFIX = ".distcp"

# Of our saves; what stock writes has dashes in it.
_SAVE_ID = re.compile("[0-9a-f]{32}")

NO_METADATA = -1
"""What an index says of the size of ``.metadata`` where its tables stand for that file."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's elements lie: row-major unless ``strides`` say something else.

    Attributes:
        dtype: As torch calls it, without the module.
        data_offset: In the file, of element 0.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    data_offset: int


@dataclass(frozen=True)
class Record:
    """Where a chunk of a tensor, or a value, lies.

    Attributes:
        file: Its name in the directory.
        offset: Of the record in the file, in bytes.
        tensor: The elements in it; ``None`` where only ``torch.load`` understands the record.
    """

    file: str
    offset: int
    num_bytes: int
    tensor: StoredTensor | None


class CheckpointIndex:
    """The index of one save.

    Attributes:
        files: The rank files by name.
        tables: The encoded metadata; empty where there is a ``.metadata``.
        notes: The ``world_size`` of the save, and the versions of ``torch`` and ``torchtitan_ext``.
    """

    def __init__(self, index: _core.Index) -> None:
        self.save_id = index.save_id
        self.files = {file.name: file for file in index.files}
        self.tables = index.tables
        self.notes = index.notes
        self._tensors: dict[str, dict[int, StoredTensor]] = {}

    def tensors(self, name: str) -> dict[int, StoredTensor]:
        """The plain tensors of known dtypes in a file, by the offset of their records."""
        if name not in self._tensors:
            self._tensors[name] = {
                one.offset: StoredTensor(one.dtype, one.sizes, row_major_strides(one.sizes), one.data_offset)
                for one in _core.parse_records(self.files[name])
                if one.dtype in ITEM_BYTES
            }
        return self._tensors[name]


def is_save_id(save_id: object) -> TypeGuard[str]:
    """Whether this is the id of a save of ours, by its form. What a damaged checkpoint says may be anything."""
    return isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None


def is_local(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether this names a directory and no URL. Stock asks for a directory above it that can be written to, so that it
    knows no storage for a checkpoint in read-only ones, or at a mount point below them."""
    return isinstance(checkpoint_id, Path) or "://" not in str(checkpoint_id)


def metadata_path(directory: Path, rank: int | None) -> Path:
    return directory / (".metadata" if rank is None else f"__{rank}.metadata")


def index_path(directory: Path, rank: int | None, save_id: str | None = None) -> Path:
    """A save in place names its index by its id: the one of the checkpoint that is there stays until the commit."""
    name = ".tte_index" if rank is None else f"__{rank}.tte_index"
    return directory / (name if save_id is None else f"{name}.{save_id}")


def shown(path: Path) -> str:
    """A path in messages that are made in C++: file names need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def data_path(directory: Path, relative_path: str) -> Path:
    """Where ``.metadata`` says that a record lies.

    Raises:
        DamagedCheckpointError: That is outside of the checkpoint's directory.
    """
    path = directory / relative_path
    if _core.leads_outside(relative_path) or not path.resolve().is_relative_to(directory.resolve()):
        raise DamagedCheckpointError(
            f"{directory}: .metadata names the file {relative_path!r}, which is outside of the checkpoint"
        )
    return path


def parse_index(
    path: Path,
    content: bytes,
    metadata: bytes | None,
    *,
    verify: str,
    has_file: Callable[[_core.RankFile], bool] = lambda file: False,
) -> CheckpointIndex | None:
    """The index that belongs to these bytes of ``.metadata``, or that stands for the file where there is none.

    Args:
        path: Of the index, for messages.
        content: What it holds.
        has_file: Whether ``.metadata`` names a file of the index that is still as the index says. Stock would have
            written it anew; so it is ``.metadata`` that is damaged.

    Returns:
        ``None`` where it is another save's: stock saved over a checkpoint of ours.

    Raises:
        DamagedCheckpointError: The index is damaged or newer than this reader; with ``verify="all"`` also where it
            belongs to another ``.metadata``, which a damaged one cannot be told from.
    """
    try:
        parsed = _core.parse_index(content, shown(path))
        index = CheckpointIndex(parsed)
    except ValueError as error:  # a FormatError, or a name that is no UTF-8
        if verify == "none" and metadata is not None:
            warnings.warn(f"the index is ignored: {error}", stacklevel=2)
            return None
        if metadata is None:
            raise DamagedCheckpointError(f"{error}; there is no .metadata to read without it") from None
        advice = "; verify='none' reads without the index and its checksums"
        raise DamagedCheckpointError(str(error), advice) from None
    if metadata is None:
        return index if parsed.metadata_bytes == NO_METADATA else None
    if (parsed.metadata_bytes, parsed.metadata_digest) != (len(metadata), _core.digest(metadata)):
        if verify != "none" and any(map(has_file, index.files.values())):
            raise DamagedCheckpointError(
                f"the .metadata beside {path} is not the one that was saved with its files: what it says of keys and "
                "places is not to be trusted",
                "; verify='none' reads it all the same",
            )
        text = (
            f"{path} belongs to another .metadata than the one beside it: the checkpoint was saved over by stock DCP, "
            "or .metadata is damaged"
        )
        if verify == "all":
            raise DamagedCheckpointError(text, "; verify='auto' reads it without this index")
        warnings.warn(f"{text}; it is read without this index", stacklevel=2)
        return None
    return index


def data_file_bytes(directory: Path) -> dict[str, int]:
    """Sizes of the data files in a checkpoint's directory, by name."""
    with os.scandir(directory) as entries:
        files = [entry for entry in entries if entry.name.endswith((".distcp", ".safetensors"))]
        return {entry.name: entry.stat().st_size for entry in sorted(files, key=lambda one: one.name)}


def metadata_file_bytes(directory: Path, save_id: str | None) -> tuple[int, int]:
    """Sizes of ``.metadata`` and of the index that a reader takes with it; 0 where there is none.

    Args:
        save_id: Of the save that ``.metadata`` names.
    """
    sizes = []
    named = [index_path(directory, None, save_id)] if save_id else []
    for paths in ([metadata_path(directory, None)], [*named, index_path(directory, None)]):
        sizes.append(next((path.stat().st_size for path in paths if path.exists()), 0))
    return sizes[0], sizes[1]


def write_file(path: Path, content: bytes, *, sync: bool) -> None:
    """Writes a new file. What has that name is unlinked: it may be a link to a file of others, or a pipe."""
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError:
        path.unlink()
        file = path.open("xb", buffering=0)
    with file as stream:
        rest = memoryview(content)
        while rest:
            rest = rest[stream.write(rest) :]
        if sync:
            os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a directory last. Some file systems know no such call (EINVAL): their names last anyway."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


# More do not make one file faster: the file system lets one writer at a time into it.
MAX_THREADS = 8


def thread_count_of(given: int | None) -> int:
    """The given number, or this rank's share of the machine's cores (``LOCAL_WORLD_SIZE``, which torchrun sets).

    Raises:
        ValueError: The given number is not positive.
    """
    if given is not None:
        if given < 1:
            raise ValueError(f"thread_count: got {given}, expected at least 1")
        return given
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
