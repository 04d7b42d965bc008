"""The files of a checkpoint's directory: their names, the index of their contents, and how many threads read them.

``.metadata`` and ``__<rank>_0.distcp`` are DCP's; ``.tte_index`` is ours (docs/format.md). With
``use_collectives=False`` each rank has metadata, and an index, of its own.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, TypeVar

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, named, warn
from torchtitan_ext.storage.location import Location, Place

AnyPlace = TypeVar("AnyPlace", Path, Location, Place)

DATA_SUFFIX = ".distcp"

# The id of a save of ours; stock's ids contain dashes.
_SAVE_ID = re.compile("[0-9a-f]{32}")

# A file that checkpoints of version 0.2 may share, by a link with the same name in each of them. The digit is 1 for a
# file of what had not changed since the checkpoint before. In an object store each checkpoint has a copy, and the name
# goes on with the id of the save that the copy belongs to.
SHARED_NAME = r"__\d+_([0-9a-f]{32})\.[01](?:\.[0-9a-f]{32})?\.distcp"
_SHARED = re.compile(SHARED_NAME)

# A message names so many keys of which bytes are damaged.
_MAX_NAMED = 4

# XXH3 of a block is computed right after its write, so a block should fit into a core's cache. With smaller blocks
# loads of few rows verify fewer bytes, and footers are larger.
BLOCK_BYTES = 1 << 20

NO_METADATA = -1
"""The size of ``.metadata`` in an index whose tables replace that file."""


@dataclass(frozen=True)
class Record:
    """Where the record of a chunk or a value lies.

    Attributes:
        file: The name of the file in the directory.
        offset: Byte of the file at which the record begins.
        tensor: The elements in the record; ``None`` if only ``torch.load`` can read it.
    """

    file: str
    offset: int
    num_bytes: int
    tensor: _core.StoredTensor | None


def is_save_id(save_id: object) -> TypeGuard[str]:
    """Whether a value has the form of the ids of our saves. A damaged checkpoint may contain any value."""
    return isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None


def data_name(prefix: str, save_id: str) -> str:
    """The name of a rank's file that no other save has."""
    return f"{prefix}{save_id}{DATA_SUFFIX}"


def sharing_save(name: str) -> str | None:
    """The id of the save that wrote a file with a name of ``SHARED_NAME``; ``None`` for other names."""
    match = _SHARED.fullmatch(name)
    return None if match is None else match[1]


def safetensors_paths(path: Path) -> list[Path]:
    """A file itself, or the ``*.safetensors`` of a directory, sorted."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def metadata_path(directory: AnyPlace, rank: int | None) -> AnyPlace:
    return directory / (".metadata" if rank is None else f"__{rank}.metadata")


def index_path(directory: AnyPlace, rank: int | None, save_id: str | None = None) -> AnyPlace:
    """The path of an index. A save in place adds its id, so that the old index stays until the commit."""
    name = ".tte_index" if rank is None else f"__{rank}.tte_index"
    return directory / (name if save_id is None else f"{name}.{save_id}")


def shown(path: Place) -> str:
    """A path for messages of C++: file names need not be valid text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def data_path(directory: Path, relative_path: str) -> Path:
    """The path of a file that ``.metadata`` names.

    Raises:
        DamagedCheckpointError: The path leads out of the checkpoint's directory.
    """
    path = directory / relative_path
    if _core.leads_outside(relative_path) or not path.resolve().is_relative_to(directory.resolve()):
        raise DamagedCheckpointError(
            f"{directory}: .metadata names the file {relative_path!r}, which is outside of the checkpoint"
        )
    return path


def parse_index(
    path: Place,
    content: bytes,
    metadata: bytes | None,
    *,
    verify: str,
    has_file: Callable[[_core.RankFile], bool] = lambda file: False,
) -> _core.Index | None:
    """The index that belongs to these bytes of ``.metadata``, or that replaces the file if there is none.

    Args:
        path: Path of the index, for messages.
        content: Bytes of the index.
        has_file: Whether ``.metadata`` names this file and it is still as the index describes it. Then stock has not
            saved over the checkpoint, so a ``.metadata`` that does not match the index is damaged.

    Returns:
        ``None`` if the index belongs to another save: stock saved over a checkpoint of ours.

    Raises:
        DamagedCheckpointError: The index is damaged or newer than this reader; with ``verify="all"`` also if it does
            not match ``.metadata``, which may be damaged then.
    """
    try:
        index = _core.parse_index(content, shown(path))
    except ValueError as error:  # a FormatError, or a name that is no UTF-8
        if verify == "none" and metadata is not None:
            warn(f"the index is ignored: {error}")
            return None
        if metadata is None:
            raise DamagedCheckpointError(f"{error}; there is no .metadata to read without it") from None
        advice = "; storage_reader=FileReader(path, verify='none') reads without the index and its checksums"
        raise DamagedCheckpointError(str(error), advice) from None
    if metadata is None:
        return index if index.metadata_bytes == NO_METADATA else None
    if (index.metadata_bytes, index.metadata_digest) != (len(metadata), _core.digest(metadata)):
        if verify != "none" and any(map(has_file, index.files.values())):
            raise DamagedCheckpointError(
                f"the .metadata beside {path} is not the one that was saved with its files: what it says of keys and "
                "places is not to be trusted",
                "; storage_reader=FileReader(path, verify='none') reads it all the same",
            )
        text = (
            f"{path} belongs to another .metadata than the one beside it: the checkpoint was saved over by stock DCP, "
            "or .metadata is damaged"
        )
        if verify == "all":
            raise DamagedCheckpointError(
                text, "; storage_reader=FileReader(path, verify='auto') reads it without this index"
            )
        warn(f"{text}; it is read without this index")
        return None
    return index


def find_stock_tensors(
    path: Place, places: Mapping[int, int], num_threads: int, descriptor: int = -1
) -> dict[int, _core.StoredTensor | None]:
    """The plain tensor in each of some records; ``None`` for records that only ``torch.load`` understands.

    Args:
        path: The data file; only for messages if there is a descriptor.
        places: Length of each record, by its offset.

    Raises:
        DamagedCheckpointError: A record is no whole archive, or too short for its tensor.
    """
    if not places:
        return {}
    try:
        found = _core.find_tensors(shown(path), list(places.items()), num_threads, descriptor)
    except _core.FormatError as error:
        raise DamagedCheckpointError(str(error)) from None
    return dict(zip(places, found, strict=True))


def describe_damage(
    directory: Place,
    blocks: Sequence[tuple[str, int, int]],
    parts: Iterable[_core.Part],
    index: _core.Index | None,
) -> str:
    """One sentence about blocks (file, first byte, one past the last byte) that do not match their checksums."""
    names: list[str] = []
    for part in parts:
        for name, begin, end in blocks:
            if part.path == name and part.offset < end and part.offset + part.num_bytes > begin:
                names.append(_rows_text(part, begin, end, index))
                break
    lie = named(names, _MAX_NAMED) or "no tensor, only padding"
    name, begin, end = blocks[0]
    others = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
    return f"{directory / name}: bytes {begin} to {end}{others} do not match their checksum; in them lie {lie}"


def _rows_text(part: _core.Part, begin: int, end: int, index: _core.Index | None) -> str:
    """``w[128:160]``: the rows of a key between two bytes of its file."""
    is_indexed = index is not None and part.path in index.files
    stored = index.tensors(part.path).get(part.offset) if index is not None and is_indexed else None
    if stored is None or not stored.sizes or 0 in stored.sizes:
        return part.fqn
    row_bytes = stored.strides[0] * stored.item_bytes
    first = max(0, (begin - stored.data_offset) // row_bytes)
    last = min(stored.sizes[0], -(-(end - stored.data_offset) // row_bytes))
    start = part.offsets[0] if part.offsets else 0
    return f"{part.fqn}[{start + first}:{start + max(last, first)}]"


def data_file_bytes(directory: Path) -> dict[str, int]:
    """Sizes of the data files in a checkpoint's directory, by name."""
    with os.scandir(directory) as entries:
        files = [entry for entry in entries if entry.name.endswith((".distcp", ".safetensors"))]
        return {entry.name: entry.stat().st_size for entry in sorted(files, key=lambda one: one.name)}


def write_file(path: Path, content: bytes, *, sync: bool) -> None:
    """Writes a new file. An old one is unlinked first: it may be a link to another file, or a pipe."""
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
    """Syncs the names in a directory. File systems without such a call (EINVAL) keep names anyway."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


# More threads do not write one file faster: the file system lets in one writer at a time.
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
