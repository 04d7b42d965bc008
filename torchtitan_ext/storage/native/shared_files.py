"""What a save need not write again: records of an earlier checkpoint with equal bytes, in files that both share.

A shared file is one file on the disk with a name in each checkpoint (a hard link). Each rank decides alone, about what
it would write itself, and links for itself; that two ranks link one file is one link. In an object store a shared file
is a copy, made by the store.

A rank shares a file if enough of its bytes are used: what is not used lies there as long as the file is shared. The
rest of what has not changed goes into a file of its own, beside the one for what has: the next save uses all of the
former, and none of the latter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.state.host_copies import takes_operators
from torchtitan_ext.state.value_digest import ShardSums
from torchtitan_ext.storage.checkpoint_files import index_path, shared_name, shown
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint, has_footer
from torchtitan_ext.storage.location import Location, Place
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.raw_tensor import NAMES, raw_memory

# A rank that could link more files than this links half as many, the largest, and writes the rest again, in one file:
# hundreds of saves must not end in hundreds of files.
MAX_SHARED_FILES = 16

_ANOTHER_FILE = "it is not the file that its index describes"

# No store copies more by one request (S3: 5 GB).
MAX_COPY_BYTES = 5 * 10**9


@dataclass(frozen=True)
class WrittenFiles:
    """What one rank has written, and, for a save with ``reuse``, what it shares.

    Attributes:
        shared: With the records that this rank uses of them.
        not_reused: Why the rank could not share what it should have shared; empty if nothing stood in the way.
    """

    written: Sequence[_core.RankFile]
    shared: Sequence[_core.RankFile] = ()
    not_reused: str = ""

    @property
    def reused_bytes(self) -> int:
        return sum(record.num_bytes for file in self.shared for record in _core.parse_records(file))


@runtime_checkable
class CountsRequests(Protocol):
    """A planner that can be asked for an item again, and lets go of the state after the last request."""

    def expect_requests(self, num_more: int) -> None: ...


@dataclass(frozen=True)
class Unchanged:
    """What has not changed of the items of a plan.

    Attributes:
        reused: The items that lie in shared files.
        kept: Those that are written again all the same.
        values: What a planner has given that may be asked only once for each item.
    """

    reused: frozenset[MetadataIndex] = frozenset()
    kept: frozenset[MetadataIndex] = frozenset()
    values: dict[MetadataIndex, Any] = field(default_factory=dict)
    shared: Sequence[_core.RankFile] = ()
    not_reused: str = ""


def share_unchanged(items: Sequence[WriteItem], planner: SavePlanner, earlier: EarlierFiles) -> Unchanged:
    """Shares the files of an earlier checkpoint that hold enough of these items.

    Our planner is asked once more for what is to be written. What others give is held until then: of DCP's planner
    these are the tensors of the state.
    """
    try:
        path, content = earlier.read_index()
        if content is None:
            return Unchanged(not_reused=f"{earlier.place} has no index of ours")
        index = _core.parse_index(content, shown(path))
    except (OSError, ValueError) as error:
        return Unchanged(not_reused=str(error))
    if not index.has_sums:
        return Unchanged(not_reused=f"{earlier.place} was saved without fingerprints")
    values: dict[MetadataIndex, Any] = {}
    wanted = _records_of(items, planner, None if isinstance(planner, CountsRequests) else values)
    found: dict[str, dict[MetadataIndex, _core.SavedRecord]] = {}
    for key, one in zip(wanted, _core.find_unchanged(index, list(wanted.values())), strict=True):
        if one is not None:
            found.setdefault(one[0], {})[key] = one[1]
    shared: list[_core.RankFile] = []
    reused: set[MetadataIndex] = set()
    problems: list[str] = []
    for name in _worth_sharing(index, found, earlier.least_part):
        file = index.files[name]
        try:
            new_name = earlier.share(file)
        except OSError as error:
            problems.append(f"{earlier.place / name} cannot be shared: {error.strerror}")
            continue
        save_id = file.save_id or index.save_id
        shared.append(_core.share_file(file, save_id, new_name, list(found[name].values())))
        reused |= found[name].keys()
    kept = frozenset().union(*found.values()) - reused
    if isinstance(planner, CountsRequests):
        planner.expect_requests(-len(reused))
    for key in reused:
        values.pop(key, None)
    return Unchanged(frozenset(reused), kept, values, shared, "; ".join(dict.fromkeys(problems)))


def _records_of(
    items: Sequence[WriteItem], planner: SavePlanner, values: dict[MetadataIndex, Any] | None
) -> dict[MetadataIndex, _core.SavedRecord]:
    """The records of the items that are plain tensors, with their sums and without places.

    Args:
        values: Gets what the planner gives; ``None`` if it can be asked again.
    """
    sums = ShardSums[MetadataIndex]()
    forms: dict[MetadataIndex, tuple[str, tuple[int, ...]]] = {}
    has_operators: dict[torch.device, bool] = {torch.device("cpu"): True}
    for item in items:
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            continue
        if values is None:
            cast(CountsRequests, planner).expect_requests(1)
        value = planner.resolve_data(item)
        if values is not None:
            values[item.index] = value
        raw = raw_memory(value.detach()) if isinstance(value, torch.Tensor) else None
        if raw is None or raw.numel() == 0 or raw.shape != item.tensor_data.chunk.sizes:
            continue
        if raw.device not in has_operators:
            has_operators[raw.device] = takes_operators(raw.device)
        if not has_operators[raw.device]:
            raw = raw.cpu()
        offsets = tuple(item.index.offset or (0,) * raw.dim())
        sums.add_box(item.index, raw, offsets, tuple(item.tensor_data.size))
        forms[item.index] = NAMES[raw.dtype], tuple(raw.shape)
    numbers, _ = sums.found()  # without those that lie in no tensor of the global size
    return {
        key: _core.SavedRecord((key.fqn, key.offset, key.index), *forms[key], _core.add_sums(total))
        for key, total in numbers.items()
    }


def _worth_sharing(
    index: _core.Index, found: Mapping[str, Mapping[MetadataIndex, _core.SavedRecord]], least_part: float
) -> list[str]:
    """The files of which enough is used, those with the most used bytes first."""
    used = {name: sum(record.num_bytes for record in records.values()) for name, records in found.items()}
    worth = [name for name, num_bytes in used.items() if num_bytes >= least_part * index.files[name].footer_offset]
    worth.sort(key=lambda name: (-used[name], name))
    return worth if len(worth) <= MAX_SHARED_FILES else worth[: MAX_SHARED_FILES // 2]


@dataclass
class LinkedFiles:
    """Links files of an earlier checkpoint, at least half used, into the directory of a save; with ``sync`` they are on
    the disk then."""

    least_part = 0.5

    place: Path
    directory: Path
    sync: bool

    def read_index(self) -> tuple[Place, bytes | None]:
        self._opened = OpenedCheckpoint(self.place)
        return self._opened.read_index(None, None)

    def share(self, file: _core.RankFile) -> str:
        """Makes a file of the index one of the new checkpoint too, and returns its name there.

        Raises:
            OSError: That is not possible, or it is gone. Where it is another file than the index describes, the new
                name stays, since another rank may use it; the commit removes those that none uses.
        """
        name = shared_name(file.name)
        if name is None:
            raise OSError(errno.EINVAL, "it has a name of stock DCP, which would write into it")
        with contextlib.suppress(FileExistsError):  # another rank was first
            self._opened.link(file.name, self.directory / name)
        # It may be gone or another one by now.
        if not _is_as_indexed(self.directory / name, file, sync=self.sync):
            raise OSError(errno.ESTALE, _ANOTHER_FILE)
        return name


@dataclass
class CopiedObjects:
    """Has a store copy the objects of an earlier checkpoint into the folder of a save, under names of that save.

    A copy takes space, so nearly all of it must be used. It may be asked for again, whatever became of an answer: no
    save changes the bytes of an object that has a save's id.

    Attributes:
        earlier_id: The id of the save that made the earlier checkpoint; ``None`` if it is not ours.
    """

    least_part = 0.9

    place: Location
    earlier_id: str | None
    target: Location
    save_id: str

    def read_index(self) -> tuple[Place, bytes | None]:
        path = index_path(self.place, None, self.earlier_id)
        return path, None if self.earlier_id is None else ObjectFolder(self.place).content(path.name)

    def share(self, file: _core.RankFile) -> str:
        name, folder = shared_name(file.name, self.save_id), ObjectFolder(self.target)
        if name is None:
            raise OSError(errno.EINVAL, "it has a name of stock DCP, which does not say which save wrote it")
        if file.num_bytes > MAX_COPY_BYTES:
            raise OSError(errno.EFBIG, f"it has {file.num_bytes} bytes, and a store copies at most {MAX_COPY_BYTES}")
        folder.copy_from(ObjectFolder(self.place), file.name, name)
        end, num_bytes = folder.read_range(name, file.footer_offset, file.num_bytes)
        if (num_bytes, _core.digest(bytes(end))) != (file.num_bytes, file.footer_digest):
            raise OSError(errno.ESTALE, _ANOTHER_FILE)
        return name


EarlierFiles = LinkedFiles | CopiedObjects


def _is_as_indexed(path: Path, file: _core.RankFile, *, sync: bool) -> bool:
    """Whether this is a file with the size and the footer that an index describes; with ``sync`` it is on the disk."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not has_footer(descriptor, file):
            return False
        if sync:  # the earlier save may not have waited for the disk
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True
