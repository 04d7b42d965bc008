"""A storage reader of safetensors, a file or a directory of them: each rank reads the runs that it wants.

A directory may get other weights meanwhile (``formats/weights_directory.py``), so the files that a rank reads are those
of which it has read the headers: it keeps them open, or compares them with what they were when it opens them again.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, Problem, SavedOverError, UnknownFormatError, named, refusal
from torchtitan_ext.storage.checkpoint_files import Record, shown
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint, identity_of
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.safetensors_files import (
    MAX_HEADER_BYTES,
    ChunkRecord,
    find_safetensors,
    header_end,
    index_among,
    read_weight_map,
    tensors_in_files,
)
from torchtitan_ext.storage.location import Location, Place
from torchtitan_ext.storage.metadata.dcp_objects import metadata_of_state, places_of
from torchtitan_ext.storage.native.file_reader import FileReader, MetadataMark
from torchtitan_ext.storage.native.open_files import Chunk
from torchtitan_ext.storage.objects.folder import ObjectFolder, ObjectStamp
from torchtitan_ext.storage.objects.opened import Opened, OpenedObjects
from torchtitan_ext.storage.raw_tensor import NAMES

# The first request for an object brings its header, mostly.
_HEAD_BYTES = 1 << 18

# Weights are replaced now and then, not all the time.
_MAX_ATTEMPTS = 3

_MAX_NAMED = 4


def reader_at(path: str | os.PathLike[str]) -> FileReader:
    """The reader of the checkpoint at a path, as its format asks for; a ``FileReader`` where there is none."""
    try:
        is_safetensors = format_of(path) == "safetensors"
    except (OSError, UnknownFormatError):
        is_safetensors = False
    return SafetensorsReader(path) if is_safetensors else FileReader(path)


class SafetensorsReader(FileReader):
    """A ``FileReader`` of safetensors: one file, or a directory with some, with or without an index; also by URL.

    Chunks of tensors that DCP's writer for Hugging Face has noted in the headers are put together. The format has no
    checksums, so nothing is verified but headers and sizes of files.

    Args:
        path: The directory or the file.
        thread_count: As in ``FileReader``.

    Raises:
        ReshardError: (``read_metadata``) A header, an index or a file is damaged, missing or short; names it.
    """

    _stamps: dict[str, ObjectStamp]
    _of_different_saves = "ranks have opened the files of different saves"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            found = self._find()
        except (DamagedCheckpointError, OSError) as error:
            detail = f"cannot be read ({error}); copy it again, or give another checkpoint"
            raise refusal("load", [Problem("broken_checkpoint", str(self.path), detail)]) from None
        files = PlainFiles(self.path, found, {}, {fqn: (fqn,) for fqn in found})
        places = [
            (fqn, offsets, record.file, record.offset, record.tensor and (record.tensor.dtype, record.tensor.sizes))
            for fqn, chunks in found.items()
            for offsets, record in chunks
        ]
        self.metadata_digest = f"{_core.digest(repr(places).encode()):016x}"
        meta = StorageMeta(load_id=self.load_id)
        metadata = metadata_of_state(files.state)
        return dataclasses.replace(metadata, storage_data=places_of(files.records), storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if metadata.storage_data is None:
            raise ValueError(f"SafetensorsReader: the metadata of {self.path} does not say where its tensors lie")
        self.storage_data = metadata.storage_data
        self._entries: Mapping[str, Any] = metadata.state_dict_metadata
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
            self._descriptor(name)
        if not self._identities:  # with dcp.load one rank reads the headers for all
            return plan
        digest = f"{_core.digest(repr(sorted(self._identities.items())).encode()):016x}"
        if isinstance(self.path, Location):  # which is one place for all ranks
            return dataclasses.replace(plan, storage_data=MetadataMark(digest, (str(self.path),)))
        assert isinstance(self.files, OpenedCheckpoint)
        # Ranks of one host that name one path on one file system; containers of a host may have disks of their own.
        place = (socket.gethostname(), str(self.files.directory.stat().st_dev), os.path.realpath(self.path))
        return dataclasses.replace(plan, storage_data=MetadataMark(digest, place))

    @property
    def files(self) -> Opened:
        if self._opened is None:
            if isinstance(self.path, Location):
                self._opened = OpenedObjects(_folder_of(self.path), have_footers=False)
            else:
                directory = self.path if self.path.is_dir() else self.path.parent
                self._opened = OpenedCheckpoint(directory, may_link=True)
        return self._opened

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        places = [self._place_of(key) for key in keys]
        return [Record(*place, self._stored(key, place[1])) for key, place in zip(keys, places, strict=True)]

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        return runs.add_file(shown(self.files.directory / name), -1, self._descriptor(name))

    def _find(self) -> dict[str, list[ChunkRecord]]:
        """The chunks of each tensor, from headers and index of one save."""
        for _ in range(_MAX_ATTEMPTS):
            self._forget()
            before = _stamp(self.path)
            try:
                found = self._tensors()
            except (DamagedCheckpointError, OSError):
                if _stamp(self.path) == before:
                    raise
            else:
                self._check_single(found)
                if _stamp(self.path) == before:
                    return found
        raise SavedOverError(str(self.path), "its files change all the time")

    def _tensors(self) -> dict[str, list[ChunkRecord]]:
        """The chunks of each tensor in the files that are there now."""
        if not isinstance(self.path, Location):
            return find_safetensors(self.path, self._descriptor)
        folder = ObjectFolder(_folder_of(self.path))
        self._stamps = folder.stamps()
        if folder.location != self.path:
            return tensors_in_files(folder.location, [self.path.name], None, self._descriptor_with_header)
        index = index_among(self._stamps)
        weight_map = None if index is None else read_weight_map(self.path / index, folder.read(index))
        names = [name for name in self._stamps if name.endswith(".safetensors")]
        return tensors_in_files(self.path, names, weight_map, self._descriptor_with_header)

    def _descriptor_with_header(self, name: str) -> int:
        """The file in memory of an object, with its header, of which the first bytes say how long it is."""
        descriptor, opened = self._descriptor(name), self.files
        assert isinstance(opened, OpenedObjects)
        file_bytes = os.fstat(descriptor).st_size
        begin = min(file_bytes, _HEAD_BYTES)
        opened.bring_ranges(name, [(0, begin)])
        end = header_end(descriptor)
        if begin < end <= min(file_bytes, MAX_HEADER_BYTES):
            opened.bring_ranges(name, [(begin, end)])
        return descriptor

    def _check_single(self, found: Mapping[str, list[ChunkRecord]]) -> None:
        """Refuses tensors that several files have: those of an earlier save may lie beside them."""
        problems = []
        for fqn, places in found.items():
            begins = [offsets for offsets, record in places if record.num_bytes]
            if len(begins) > len(set(begins)):
                names = [record.file for _, record in places]
                detail = f"stands in {len(names)} files ({named(names, _MAX_NAMED)}); leave it in one"
                problems.append(Problem("broken_checkpoint", fqn, detail))
        if problems:
            raise refusal("load", problems)

    def _descriptor(self, name: str) -> int:
        """A file, opened; the one whose header was read."""
        try:
            descriptor = self.files.descriptor(name)
        except FileNotFoundError:
            if name in self._identities:
                raise SavedOverError(str(self.path), f"{name} of the earlier save is gone") from None
            raise
        identity: tuple[object, ...] = identity_of(os.fstat(descriptor))
        if isinstance(self.path, Location):
            identity = self._stamps[name][:3] if name in self._stamps else ()
        if self._identities.setdefault(name, identity) != identity:
            raise SavedOverError(str(self.path), f"{name} was replaced")
        self.files.trim()
        return descriptor

    def _stored(self, key: Chunk, begin: int) -> _core.StoredTensor:
        entry = self._entries[key.fqn]
        assert isinstance(entry, TensorStorageMetadata), f"{key.fqn} is no tensor, please report"
        offsets = tuple(key.offset or ())
        sizes = next(chunk.sizes for chunk in entry.chunks if tuple(chunk.offsets) == offsets)
        return _core.StoredTensor(NAMES[entry.properties.dtype], sizes, None, begin)

    def _forget(self) -> None:
        super()._forget()
        self._identities: dict[str, tuple[object, ...]] = {}
        self._stamps = {}


def _folder_of(path: Location) -> Location:
    return path.parent if path.name.endswith(".safetensors") else path


def _stamp(path: Place) -> tuple[object, ...]:
    """Changes with the names in a directory, and with a file; in a store with any object of the folder."""
    if isinstance(path, Location):
        return tuple(sorted((name, stamp.tag) for name, stamp in ObjectFolder(_folder_of(path)).stamps().items()))
    return identity_of(path.stat())
