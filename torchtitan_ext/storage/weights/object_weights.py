"""Safetensors files in an object store: each goes through one rank, in its order, by the parts of an upload.

    model-00001-of-00002-3f2a9c1b.safetensors     a name that no other save has
    model-00002-of-00002-3f2a9c1b.safetensors
    model.safetensors.index.json                  names them; put last, if there is none yet

Ranks send what they hold to the writers of the files (``one_writer.py``). None runs ahead of the slowest by more than
a window, so a writer holds no more than that of a file; what is complete goes to the store and is freed.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchtitan_ext import _core
from torchtitan_ext.errors import WrongValueError, only_printed
from torchtitan_ext.state.host_copies import row_major_boxes
from torchtitan_ext.storage.commit.leftovers import is_checkpoint_name
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.safetensors_files import INDEX_NAME, INDEX_SUFFIX, NewSafetensors, read_header
from torchtitan_ext.storage.location import Location, is_in_object_store
from torchtitan_ext.storage.objects.commit import ObjectCommit
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.parts import ObjectParts
from torchtitan_ext.storage.weights.boxes import PlacedBoxes, steps
from torchtitan_ext.storage.weights.layout import index_of_weights
from torchtitan_ext.storage.weights.one_writer import OneWriterPerFile, WriterRanks
from torchtitan_ext.storage.weights.placed import FilePart
from torchtitan_ext.storage.weights.writer import Entries, SafetensorsWriter, StagedWeights

_WINDOW_BYTES = 64 << 20

# Files that a writer writes one after the other are that far from each other in the order of all bytes.
_FILE_BITS = 44
_END = 1 << 62

# Of a save that has not ended: no reader that follows an index sees it.
_UNNAMED = re.compile(r"model(-\d{5}-of-\d{5})?-[0-9a-f]{8}\.safetensors")


class ObjectWeightsWriter(SafetensorsWriter):
    """A ``SafetensorsWriter`` at a URL, through ``obstore``; ``tte.weights.save`` takes it by itself.

    Args:
        url: A folder that has no weights: a store cannot replace several objects at once.
        max_file_bytes, weights_map: As in ``SafetensorsWriter``.

    Raises:
        FileExistsError: The folder has weights, or a checkpoint of DCP.
        SaveInProgressError: Another save of this folder ended first.
        UnknownOutcomeError: The store does not say whether it has the index.
        OSError: (in the future of ``write_data``) The store refuses a request, or cannot be reached.
    """

    _commit: ObjectCommit | None = None

    def _go_to(self, path: str | os.PathLike[str]) -> None:
        self.path = self.target = self._url = Location(path)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        if len(plans) > 1 and self.ranks is None:
            raise WrongValueError(
                f"weights.async_save: got {str(self.path)!r} and {len(plans)} ranks, which have no group to send each "
                "other the files of a store beside training; call tte.weights.save"
            )
        for name in ObjectFolder(self._url).stamps():
            is_weights = name.endswith((".safetensors", INDEX_SUFFIX)) and not _UNNAMED.fullmatch(name)
            if is_weights or is_checkpoint_name(name):
                raise FileExistsError(f"{self.path} holds {name}; give a folder without weights, or delete them first")
        files, known = self._lay_out()
        suffix = f"-{self.save_id[:8]}.safetensors"
        self._planned = {name.replace(".safetensors", suffix): file for name, file in files.items()}
        self._commit = ObjectCommit(self._url, self.save_id, None)
        data = StagedWeights("", len(files), known, True, self._planned)
        return [dataclasses.replace(plan, storage_data=data) for plan in plans]

    def finish(self, metadata: object, results: Sequence[int]) -> None:  # type: ignore[override]
        assert self._commit is not None, "finish without prepare_global_plan, please report"
        self.confirm()
        self._commit.put(INDEX_NAME, index_of_weights(self._planned))
        self._commit = None

    def abandon(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None and not commit.may_be_committed:
            with only_printed():
                ObjectFolder(self._url).delete(list(self._planned))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_in_object_store(checkpoint_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> int:
        try:
            return super()._write(plan, planner)
        except BaseException:
            self._one_writer_of(plan.storage_data).abandon()
            raise

    def _one_writer_of(self, staged: StagedWeights) -> FilesToObjects:
        if not isinstance(self._one_writer, FilesToObjects):
            self._one_writer = FilesToObjects(self.ranks, ObjectFolder(self._url), staged.files)
        return self._one_writer

    def _paths_of(self, staged: StagedWeights) -> list[Path]:
        return self._one_writer_of(staged).paths

    def _find_entries(self, staged: StagedWeights, fqns: Iterable[str], paths: Iterable[Path]) -> Entries:
        return {fqn: (path, entry) for path in paths for fqn, entry in read_header(path).items()}

    def _add(self, parts: Iterable[tuple[FilePart, torch.Tensor]], entries: Entries, boxes: PlacedBoxes) -> None:
        """Adds pieces in the order in which all ranks go through the files, each when the slowest rank is near."""
        assert isinstance(self._one_writer, FilesToObjects), "no files to write to, please report"
        files = self._one_writer
        pieces: list[tuple[int, FilePart, torch.Tensor]] = []
        for part, values in parts:
            path, entry = entries[part.fqn]
            item_bytes = max([values.element_size(), *(dtype.itemsize for dtype in part.dtypes)])
            for inside, box in row_major_boxes(values, max(1, files.max_queued_bytes // item_bytes)):
                piece = part._replace(position=part.position + steps(inside, part.strides))
                begin = entry.begin + piece.position * ITEM_BYTES[entry.dtype]
                pieces.append((files.position_of(path, begin), piece, box))
        for position, piece, box in sorted(pieces, key=lambda one: one[0]):
            files.position = position
            while position > files.least + _WINDOW_BYTES:
                boxes.write()
            boxes.add(piece, box.cpu(), *entries[piece.fqn])
        files.position = _END


class FilesToObjects(OneWriterPerFile):
    """Files in memory that have their headers and what has come and not gone yet, and uploads of those of this rank.

    Attributes:
        paths: For code that reads and writes files.
    """

    def __init__(self, ranks: WriterRanks | None, folder: ObjectFolder, files: Mapping[str, NewSafetensors]) -> None:
        super().__init__(ranks or WriterRanks("", 0, 1, 0.0), len(files))
        self._folder = folder
        self._names = list(files)
        self._parts: dict[int, ObjectParts] = {}
        self._sent = [0] * len(files)
        self._descriptors = [os.memfd_create("torchtitan_ext") for _ in files]
        for descriptor, file in zip(self._descriptors, files.values(), strict=True):
            os.pwrite(descriptor, file.header, 0)
            os.ftruncate(descriptor, file.num_bytes)
        self._memory = [mmap.mmap(descriptor, 0) for descriptor in self._descriptors]
        self.paths = [Path(f"/proc/self/fd/{descriptor}") for descriptor in self._descriptors]

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def abandon(self) -> None:
        """Ends the uploads that have failed."""
        for parts in self._parts.values():
            parts.abandon()

    def position_of(self, path: Path, begin: int) -> int:
        """Of a byte of a file in the order in which all files are written, those of several ranks at one time."""
        return self._first(self.paths.index(path)) + begin

    def round(self, runs: _core.RunWriter, num_threads: int, *, starts_write_back: bool, is_last: bool) -> bool:
        if self._ranks.size == 1:
            runs.write(num_threads, starts_write_back)
            self._is_over, self.least = is_last, self.position
        else:
            super().round(runs, num_threads, starts_write_back=starts_write_back, is_last=is_last)
        for number in filter(self.writes, range(len(self.paths))):
            self._send(number, min(max(0, self.least - self._first(number)), len(self._memory[number])))
        return self._is_over

    def refuse(self) -> None:
        if self._ranks.size > 1:
            super().refuse()

    def _first(self, number: int) -> int:
        return (number // self._ranks.size if len(self.paths) > self._ranks.size else 0) << _FILE_BITS

    def _send(self, number: int, end: int) -> None:
        """Sends a file up to here in full parts, or the rest of it, and frees the memory."""
        memory = self._memory[number]
        begin, is_rest = self._sent[number], end == len(memory)
        if begin == len(memory):
            return
        if number not in self._parts:
            self._parts[number] = ObjectParts(self._folder, self._names[number], len(memory))
        parts = self._parts[number]
        while begin < end and (is_rest or end - begin >= parts.part_bytes):
            num_bytes = min(parts.part_bytes, end - begin)
            parts.write(np.frombuffer(memory, np.uint8, num_bytes, begin).copy())
            begin += num_bytes
            memory.madvise(mmap.MADV_REMOVE, 0, begin & -mmap.PAGESIZE)
        self._sent[number] = begin
        if is_rest:
            self._parts.pop(number).close()
