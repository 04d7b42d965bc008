"""A checkpoint in an object store as it was when it was opened: the counterpart of ``commit/opened.py``.

Parts have keys that no other save has, so what is read is of the save whose ``.metadata`` was read, or gone. What is
small, the ends of files with their checksums, is kept in memory that the native reader opens as a file; what is large
goes from the answer of a request to its place. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, SavedOverError
from torchtitan_ext.storage.checkpoint_files import index_path, is_save_id
from torchtitan_ext.storage.commit.leftovers import is_checkpoint_name
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint
from torchtitan_ext.storage.location import Location, Place
from torchtitan_ext.storage.objects.folder import ObjectFolder, ObjectStamp

_Item = TypeVar("_Item")

# So many requests are under way at a time, of so many bytes each, or of one block: 128 MiB of memory. One connection of
# a store brings 50 to 100 MB/s.
_MAX_REQUESTS = 8
_REQUEST_BYTES = 16 << 20
# Bytes that nobody wants are read along up to here: they take less time than another request.
_GAP_BYTES = 1 << 20

# The ends of more files are not kept.
_MAX_HELD = 512
# Of a file that no index describes: a footer has 8 bytes for each MiB.
_UNKNOWN_END_BYTES = 1 << 20
# Of a record that no index describes: what says whether it is a plain tensor, and which, lies at its ends.
_RECORD_END_BYTES = 16 << 10


class OpenedObjects:
    """Has the methods of ``OpenedCheckpoint``.

    Args:
        have_footers: Whether the files may be ours, so that their ends are read when they are opened.
    """

    read_bytes = _MAX_REQUESTS * _REQUEST_BYTES

    def __init__(self, directory: Location, *, have_footers: bool = True) -> None:
        self.directory = directory
        self._have_footers = have_footers
        self.copy = ""
        self._folder = ObjectFolder(directory)
        self._metadata_name = ""
        self._metadata: ObjectStamp | None = None
        self._ends: dict[str, int] = {}
        self._files: Mapping[str, _core.RankFile] = {}
        self._sizes: dict[str, int] | None = None

    def __del__(self) -> None:
        for descriptor in self._ends.values():
            os.close(descriptor)

    def __reduce__(self) -> tuple[Callable[..., OpenedObjects], tuple[Location]]:
        return partial(OpenedObjects, have_footers=self._have_footers), (self.directory,)

    def read_metadata(self, name: str) -> bytes:
        content, self._metadata = self._folder.read_stamped(name)
        self._metadata_name = name
        self.copy = f"{self._metadata.tag} {self._metadata.version} {self._metadata.num_bytes}"
        return content

    def read_index(self, rank: int | None, save_id: str | None) -> tuple[Location, bytes | None]:
        path = index_path(self.directory, rank, save_id if is_save_id(save_id) else None)
        content = self._folder.content(path.name)
        if content is None:
            self._check_not_saved_over(path.name)
        return path, content

    def hold(self, names: Iterable[str]) -> None:
        """Reads the ends of files for later reads.

        Raises:
            SavedOverError: Another save has replaced the checkpoint.
        """
        _side_by_side(self.descriptor, sorted(set(names) - self._ends.keys())[:_MAX_HELD])

    def trim(self) -> None:
        for name in list(self._ends)[:-_MAX_HELD]:
            os.close(self._ends.pop(name))

    def descriptor(self, name: str) -> int:
        """A file in memory, of the object's size, that has the end of the object and is empty before.

        Raises:
            DamagedCheckpointError: There is no such object, or it lies outside of the checkpoint's folder.
            SavedOverError: Another save has replaced the checkpoint.
        """
        if name not in self._ends:
            if _core.leads_outside(name):
                raise DamagedCheckpointError(
                    f"{self.directory}: .metadata names the file {name!r}, which is outside of the checkpoint"
                )
            begin, content, num_bytes = self._end_of(name)
            descriptor = os.memfd_create("torchtitan_ext")
            os.ftruncate(descriptor, num_bytes)
            os.pwrite(descriptor, content, begin)
            self._ends[name] = descriptor
        return self._ends[name]

    def expect(self, files: Mapping[str, _core.RankFile]) -> None:
        """Notes what the index says of the files: which bytes of each have its checksums."""
        self._files = files

    def names(self) -> list[str]:
        return list(self._listed())

    def size(self, name: str) -> int | None:
        return self._listed().get(name)

    def bring(self, name: str, places: Mapping[int, int]) -> None:
        """Reads what says of records, of which this is the length by the offset, which tensors lie in them."""
        ranges = set()
        for begin, num_bytes in places.items():
            end = begin + num_bytes
            if num_bytes <= 2 * _RECORD_END_BYTES:
                ranges.add((begin, end))
            else:
                ranges |= {(begin, begin + _RECORD_END_BYTES), (end - _RECORD_END_BYTES, end)}
        self.bring_ranges(name, sorted(ranges))

    def bring_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Reads bytes ``[begin, end)`` of an object into the file of ``descriptor``."""
        descriptor = self.descriptor(name)

        def fetch(part: tuple[int, int]) -> None:
            os.pwrite(descriptor, self._range(name, *part), part[0])

        _side_by_side(fetch, ranges)

    def has(self, file: _core.RankFile) -> bool:
        """Whether a rank file is there with the footer that the index describes."""
        try:
            descriptor = self.descriptor(file.name)
        except DamagedCheckpointError:
            return False
        return _core.has_footer(file, descriptor)

    def read(
        self, runs: _core.RunReader, names: Sequence[str], num_threads: int, verify: str
    ) -> list[_core.DamagedBlock]:
        """Reads what was added to a RunReader, by ranges of objects.

        Args:
            num_threads: For files of a disk; requests wait for the network, and there are always ``_MAX_REQUESTS``.
        """
        requests = runs.requests(verify, _GAP_BYTES, _REQUEST_BYTES)

        def take(number: int) -> None:
            file, begin, end = requests[number]
            runs.take(number, self._range(names[file], begin, end))

        try:
            _side_by_side(take, range(len(requests)))
        finally:
            damaged = runs.finish()
        return damaged

    def _listed(self) -> dict[str, int]:
        """The sizes of the checkpoint's objects when this was first asked: one listing."""
        if self._sizes is None:
            self._sizes = {
                name: stamp.num_bytes for name, stamp in self._folder.stamps().items() if is_checkpoint_name(name)
            }
        return self._sizes

    def _range(self, name: str, begin: int, end: int) -> bytes:
        try:
            return self._folder.read_range(name, begin, end)[0]
        except FileNotFoundError:
            raise self._missing(name) from None

    def _end_of(self, name: str) -> tuple[int, bytes, int]:
        """The first byte of the end of a file, the end, and the size of the file."""
        file = self._files.get(name)
        try:
            if file is not None:
                begin, end = file.footer_offset, file.num_bytes
            else:
                stamp = self._folder.stamp(name)
                if stamp is None:
                    raise self._missing(name)
                end_bytes = _UNKNOWN_END_BYTES if self._have_footers else 0
                begin, end = max(0, stamp.num_bytes - end_bytes), stamp.num_bytes
            if begin == end:
                return begin, b"", end
            return begin, *self._folder.read_range(name, begin, end)
        except FileNotFoundError:
            raise self._missing(name) from None
        except OSError:
            # A store refuses ranges behind the end. Who reads on says what the file should be.
            stamp = self._folder.stamp(name)
            if stamp is None or stamp.num_bytes > begin:
                raise
            return 0, b"", stamp.num_bytes

    def _missing(self, name: str) -> DamagedCheckpointError:
        self._check_not_saved_over(name)
        return DamagedCheckpointError(f"{self.directory / name} is missing: .metadata names it")

    def _check_not_saved_over(self, missing: str) -> None:
        if self._metadata is not None and not self._metadata.is_version(self._folder.stamp(self._metadata_name)):
            raise SavedOverError(str(self.directory), f"{missing} of the earlier save is gone")


def _side_by_side(request: Callable[[_Item], object], items: Sequence[_Item]) -> None:
    """Calls a function for each item, several at a time; raises what the first of them raises."""
    if items:
        with ThreadPoolExecutor(min(len(items), _MAX_REQUESTS)) as pool:
            list(pool.map(request, items))


Opened = OpenedCheckpoint | OpenedObjects


def open_checkpoint(place: Place) -> Opened:
    """The files of a checkpoint as they are now, wherever they lie."""
    return OpenedObjects(place) if isinstance(place, Location) else OpenedCheckpoint(place)
