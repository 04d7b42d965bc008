"""A storage reader of safetensors, a file or a directory of them: each rank reads the runs that it wants.

A directory may get other weights meanwhile (``formats/weights_directory.py``), so the files that a rank reads are those
of which it has read the headers: it keeps them open, or compares them with what they were when it opens them again.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, Problem, SavedOverError, UnknownFormatError, named, refusal
from torchtitan_ext.storage.checkpoint_files import Record, shown
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint, identity_of
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord, find_safetensors
from torchtitan_ext.storage.location import is_local
from torchtitan_ext.storage.metadata.dcp_objects import metadata_of_state, places_of
from torchtitan_ext.storage.native.file_reader import FileReader, MetadataMark
from torchtitan_ext.storage.native.open_files import Chunk
from torchtitan_ext.storage.raw_tensor import NAMES

# Weights are replaced now and then, not all the time.
_MAX_ATTEMPTS = 3

_MAX_NAMED = 4


def reader_at(path: str | os.PathLike[str]) -> FileReader:
    """The reader of the checkpoint at a path, as its format asks for; a ``FileReader`` where there is none."""
    try:
        is_safetensors = is_local(path) and format_of(path) == "safetensors"
    except (OSError, UnknownFormatError):
        is_safetensors = False
    return SafetensorsReader(path) if is_safetensors else FileReader(path)


class SafetensorsReader(FileReader):
    """A ``FileReader`` of safetensors: one file, or a directory with some, with or without an index.

    Chunks of tensors that DCP's writer for Hugging Face has noted in the headers are put together. The format has no
    checksums, so nothing is verified but headers and sizes of files.

    Args:
        path: The directory or the file.
        thread_count: As in ``FileReader``.

    Raises:
        ReshardError: (``read_metadata``) A header, an index or a file is damaged, missing or short; names it.
    """

    path: Path
    _opened: OpenedCheckpoint | None
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
        # Ranks of one host that name one path on one file system; containers of a host may have disks of their own.
        place = (socket.gethostname(), str(self.files.directory.stat().st_dev), os.path.realpath(self.path))
        return dataclasses.replace(plan, storage_data=MetadataMark(digest, place))

    @property
    def files(self) -> OpenedCheckpoint:
        if self._opened is None:
            self._opened = OpenedCheckpoint(self.path if self.path.is_dir() else self.path.parent, may_link=True)
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
                found = find_safetensors(self.path, self._descriptor)
            except (DamagedCheckpointError, OSError):
                if _stamp(self.path) == before:
                    raise
            else:
                self._check_single(found)
                if _stamp(self.path) == before:
                    return found
        raise SavedOverError(str(self.path), "its files change all the time")

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
        identity = identity_of(os.fstat(descriptor))
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
        self._identities: dict[str, tuple[int, ...]] = {}


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes with the names in a directory, and with a file."""
    return identity_of(path.stat())
