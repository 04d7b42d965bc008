"""Verifies a DCP checkpoint: every file is there, has its size, belongs to the save, and no byte has changed.

Imports no torch. Bytes are compared with the checksums in our footers. Records without them, such as stock's, are
compared with the CRCs of torch, and their tensors with the metadata.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple, cast

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import (
    describe_damage,
    find_stock_tensors,
    index_path,
    metadata_path,
    shown,
    thread_count_of,
)
from torchtitan_ext.storage.commit.opened import Footers
from torchtitan_ext.storage.formats.archives import FilePart, archive_damage
from torchtitan_ext.storage.formats.detect import ZIP_START, Format
from torchtitan_ext.storage.location import Place
from torchtitan_ext.storage.metadata.saved_metadata import (
    SavedMetadata,
    ranks_with_metadata,
    read_saved_metadata,
)
from torchtitan_ext.storage.objects.opened import Opened, open_checkpoint
from torchtitan_ext.storage.progress import OnBytes

# At most so many chunks without a place are named.
_MAX_UNPLACED = 10

DamageKind = Literal[
    "lost",
    "no_file",
    "size",
    "footer",
    "checksum",
    "record",
    "header",
    "metadata",
    "chunks",
    "index",
    "unreadable",
    "fingerprint",
]
"""What is wrong with a file:

- ``lost``: the file is missing; ``no_file``: it is a directory or a pipe; ``size``: it is cut, or longer than before;
- ``footer``: its end is damaged, or of another save; ``checksum``: bytes differ from those that were written;
- ``record``: a record or an archive of ``torch.save`` is damaged, or holds another tensor;
- ``header``: the header of a safetensors file is damaged;
- ``metadata``, ``index``: it is damaged, or names something that is not there;
- ``chunks``: the chunks of a tensor do not hold every element once;
- ``fingerprint``: a chunk of a tensor is not what was saved under its key;
- ``unreadable``: the system does not let the file be read: it may be whole.
"""


class Damage(NamedTuple):
    """One damage.

    Attributes:
        file: Path relative to the checkpoint; the name if the checkpoint is one file.
        what: A sentence with the path and, if known, the tensors and rows concerned.
    """

    file: str
    what: str
    kind: DamageKind


# Errors that say that there is no such file; after any other error the file may be whole.
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def damage_of_error(file: str, path: Place, error: OSError) -> Damage:
    """The damage that an error of the system means: the file is missing, or cannot be read."""
    if error.errno in _LOST:
        return Damage(file, f"{path}: {error.strerror}", "lost")
    return Damage(file, f"{path} cannot be read: {error.strerror}", "unreadable")


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole.

    Attributes:
        is_deep: Whether all bytes were read; else only sizes, ids and metadata.
        damages: All damages, in the order of the files.
        num_files: How many data files there should be.
        num_bytes: Size of the data files that are there.
        unproved: Files in which some bytes have no checksum; empty unless ``is_deep``.
        num_proved: The number of tensors that are what was saved, by the fingerprints of the save; ``None`` where they
            were not compared, or the save stored none.
        without_fingerprints: Keys of tensors that were not compared for want of fingerprints.
    """

    path: Place
    format: Format
    is_deep: bool
    damages: Sequence[Damage]
    num_files: int
    num_bytes: int
    unproved: Sequence[str] = ()
    num_proved: int | None = None
    without_fingerprints: Sequence[str] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether something is surely wrong. A file that cannot be read may be whole."""
        return any(damage.kind != "unreadable" for damage in self.damages)


def verify_dcp(path: Place, *, is_deep: bool, on_bytes: OnBytes) -> Verdict:
    """All damages of a checkpoint, or of the checkpoints of all ranks if each has metadata of its own.

    Raises:
        FileNotFoundError: There is neither ``.metadata`` nor an index that replaces it.
    """
    opened = open_checkpoint(path)
    names = opened.names()
    ranks = [None] if {".metadata", ".tte_index"} & set(names) else ranks_with_metadata(names)
    looks = [DcpLook(opened, rank, is_deep, True, on_bytes) for rank in ranks]
    damages = [damage for look in looks for damage in look.damages()]
    damages += [look.lost_index for look in looks if look.lost_index is not None]
    unproved = sorted(set().union(*(look.unproved for look in looks))) if is_deep else []
    files = set().union(*(look.names for look in looks))
    there = sum(opened.size(name) or 0 for name in files)
    return Verdict(path, "dcp", is_deep, damages, len(files), there, unproved)


class DcpLook:
    """Verifies one metadata and the files that it names: go through ``damages``, then read the attributes.

    Args:
        rank: The rank whose metadata it is, if each rank has its own; else ``None``.
        is_deep: Whether to read the bytes of the files.
        with_crcs: Whether to read also files without our checksums.

    Attributes:
        names: The data files.
        unproved: Data files in which some bytes have no checksum.
        lost_index: Set if data files of ours have no index. It is not among ``damages``: the files can be loaded.
    """

    def __init__(self, files: Opened, rank: int | None, is_deep: bool, with_crcs: bool, on_bytes: OnBytes) -> None:
        self.names: set[str] = set()
        self.unproved: set[str] = set()
        self.lost_index: Damage | None = None
        self._files = files
        self._rank = rank
        self._is_deep = is_deep
        self._with_crcs = with_crcs
        self._on_bytes = on_bytes

    def damages(self, part: int = 0, num_parts: int = 1) -> Iterator[Damage]:
        """The damages of the metadata (in part 0), and of the files in one of several parts."""
        try:
            saved = read_saved_metadata(self._files, self._rank, verify="all")
            ends = {file.path: file.end for file in saved.columns.describe_files()}
            metadata_damages = (
                list(_metadata_damages(saved, self._files.directory / self._metadata_name)) if part == 0 else []
            )
        except DamagedCheckpointError as error:
            yield Damage(self._file_named_in(error.reason), error.reason, "metadata")
            return
        except FileNotFoundError:
            raise
        except OSError as error:
            yield damage_of_error(self._metadata_name, self._files.directory / self._metadata_name, error)
            return
        except OverflowError as error:
            yield Damage(self._metadata_name, f"{self._files.directory}: its records have no end ({error})", "metadata")
            return
        yield from metadata_damages
        indexed = {} if saved.index is None else saved.index.files
        self.names |= ends.keys() | indexed.keys()
        parts = _core.SavedParts(saved.columns)
        footers = Footers(saved.save_id)
        for name in sorted(self.names)[part::num_parts]:
            yield from self._file_damages(saved, footers, parts, name, ends.get(name, 0), indexed.get(name))
        if saved.index is None and footers.save_id:
            index = index_path(self._files.directory, self._rank)
            what = "data files were verified by their own footers, and nothing proves what .metadata says"
            self.lost_index = Damage(index.name, f"{index} is not there: {what}", "lost")

    @property
    def _metadata_name(self) -> str:
        name = metadata_path(self._files.directory, self._rank).name
        has_metadata = self._files.size(name) is not None
        return name if has_metadata else index_path(self._files.directory, self._rank).name

    def _file_named_in(self, sentence: str) -> str:
        places = {sentence.find(f"/{name}"): name for name in sorted(self._files.names())}
        return places[min(at for at in places if at >= 0)] if max(places, default=-1) >= 0 else self._metadata_name

    def _file_damages(
        self,
        saved: SavedMetadata,
        footers: Footers,
        parts: _core.SavedParts,
        name: str,
        num_bytes: int,
        indexed: _core.RankFile | None,
    ) -> Iterator[Damage]:
        path = self._files.directory / name
        try:
            descriptor = self._files.descriptor(name)
        except DamagedCheckpointError as error:
            yield Damage(name, error.reason, "metadata")
            return
        except OSError as error:
            yield damage_of_error(name, path, error)
            return
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            yield Damage(name, f"{path} is no file", "no_file")
            return
        runs = _core.RunReader()
        try:
            file = indexed or footers.find(path, descriptor)
            if file is not None:
                runs.add_checked_file(
                    shown(path), file, b"" if saved.index is None else saved.index.save_id, descriptor
                )
        except _core.FormatError as error:
            is_whole = status.st_size >= num_bytes if indexed is None else status.st_size == indexed.num_bytes
            yield Damage(name, str(error), "footer" if is_whole else "size")
            return
        except OSError as error:
            yield damage_of_error(name, path, error)
            return
        if (status.st_size if file is None else file.footer_offset) < num_bytes:
            yield Damage(name, f"{path} ends before its last record, at byte {num_bytes}", "size")
            return
        if self._is_deep:
            if file is None:
                damages = self._record_damages(name, descriptor, parts) if self._with_crcs else iter(())
            else:
                damages = self._block_damages(saved, parts, runs, name, file.footer_offset)
            try:
                yield from damages
            except OSError as error:
                yield damage_of_error(name, path, error)

    def _block_damages(
        self, saved: SavedMetadata, parts: _core.SavedParts, runs: _core.RunReader, name: str, num_bytes: int
    ) -> Iterator[Damage]:
        """Bytes that do not match our checksums; without an index, tensors that differ from the metadata."""
        damaged = self._damaged_bytes(runs, name, num_bytes)
        of_file = parts.of_file(name) if damaged else []
        for begin, end in damaged:
            what = describe_damage(self._files.directory, [(name, begin, end)], of_file, saved.index)
            yield Damage(name, what, "checksum")
        if saved.index is None and not damaged and self._with_crcs:
            tensors = [part for part in parts.of_file(name) if part.offsets is not None]
            yield from self._shape_damages(name, self._files.descriptor(name), parts, tensors)

    def _damaged_bytes(self, runs: _core.RunReader, name: str, num_bytes: int) -> list[tuple[int, int]]:
        """Ranges of bytes that do not match their checksums; adjacent blocks are one range."""
        step = self._files.read_bytes
        buffer = ctypes.create_string_buffer(min(num_bytes, step))
        ranges: list[tuple[int, int]] = []
        for begin in range(0, num_bytes, step):
            count = min(step, num_bytes - begin)
            runs.add_bytes(0, begin, count, ctypes.addressof(buffer))
            for block in self._files.read(runs, [name], thread_count_of(None), "all"):
                first = ranges.pop()[0] if ranges and ranges[-1][1] == block.begin else block.begin
                ranges.append((first, block.end))
            self._on_bytes(count)
        return ranges

    def _record_damages(self, name: str, descriptor: int, parts: _core.SavedParts) -> Iterator[Damage]:
        """Records of torch that do not match their CRCs, or whose tensors differ from the metadata."""
        tensors: list[_core.Part] = []
        for part in parts.of_file(name):
            if os.pread(descriptor, len(ZIP_START), part.offset) != ZIP_START:
                self.unproved.add(name)
                self._on_bytes(part.num_bytes)
                continue
            record = cast(BinaryIO, io.BufferedReader(FilePart(descriptor, part.offset, part.num_bytes), 1 << 18))
            problem, is_proved = archive_damage(record, is_deep=True, on_bytes=self._on_bytes)
            if problem is not None:
                yield self._damage_of(part, problem)
                continue
            if not is_proved:
                self.unproved.add(name)
            if part.offsets is not None:
                tensors.append(part)
        yield from self._shape_damages(name, descriptor, parts, tensors)

    def _shape_damages(
        self, name: str, descriptor: int, parts: _core.SavedParts, tensors: Sequence[_core.Part]
    ) -> Iterator[Damage]:
        lengths = {part.offset: part.num_bytes for part in tensors}
        try:
            found = find_stock_tensors(self._files.directory / name, lengths, thread_count_of(None), descriptor)
        except DamagedCheckpointError as error:
            yield Damage(name, error.reason, "record")
            return
        for part in tensors:
            stored, chunk = found[part.offset], parts.chunk_of(part)
            defect = None if stored is None or chunk is None else stored.shape_defect(*chunk)
            if defect is not None:
                yield self._damage_of(part, f"it {defect}")

    def _damage_of(self, part: _core.Part, what: str) -> Damage:
        path = self._files.directory / part.path
        return Damage(
            part.path, f"{path}: the record of {part.fqn}{_at(part.offsets)} at byte {part.offset}: {what}", "record"
        )


def _metadata_damages(saved: SavedMetadata, path: Place) -> Iterator[Damage]:
    """Damages in the metadata: chunks without a place, tensors whose chunks do not hold every element once."""
    for lost in saved.columns.unplaced_chunks(_MAX_UNPLACED):
        yield Damage(path.name, f"{path} does not say in which file {lost.fqn}{_at(lost.offsets)} lies", "metadata")
    for key in saved.columns.cover_defects():
        text = f"the chunks of {key.fqn} {list(key.sizes)} {key.defect}"
        yield Damage(path.name, f"{path}: {text}: it cannot be loaded", "chunks")


def _at(offsets: Sequence[int] | None) -> str:
    return f" at {list(offsets)}" if offsets and any(offsets) else ""
