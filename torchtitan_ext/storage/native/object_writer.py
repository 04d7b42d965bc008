"""A storage writer for object stores: the files of ``FileWriter`` as objects, committed by one conditional put."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchtitan_ext import _core
from torchtitan_ext.errors import WrongValueError, warn
from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES, data_name, thread_count_of
from torchtitan_ext.storage.location import Location, is_in_object_store
from torchtitan_ext.storage.native.file_writer import FilePrefix, FileWriter, tensor_bytes
from torchtitan_ext.storage.native.planned_items import writes_of
from torchtitan_ext.storage.objects.commit import begin_object_save
from torchtitan_ext.storage.objects.folder import ObjectFolder

_MAX_PARTS = 10_000
"""More parts no store takes of one object."""

# What is on its way at a time: as many bytes as a load has, in as many requests. A part is hashed before its first byte
# is sent, and few large parts come to their ends together, so that nothing is sent while the next ones are hashed.
_LEAST_PART_BYTES = 16 << 20
_BYTES_AT_A_TIME = 128 << 20
_LEAST_PARTS_AT_A_TIME = 2


@dataclass(frozen=True)
class ObjectPrefix(FilePrefix):
    """The beginning of the names of a rank's objects, and the save that they belong to: ranks share no directory from
    which they could learn it."""

    save_id: str


class ObjectWriter(FileWriter):
    """A ``FileWriter`` at a URL of S3, Google's or Azure's store, through ``obstore``; ``tte.save`` takes it by itself.

    Each rank puts its file in parts, hashed on the way; the coordinator puts ``.metadata`` last, if it is still the
    version that was there when the save began (docs/use/object_stores.md). Newer steps of a run are left as they are.

    Args:
        url: The folder of the checkpoint.
        thread_count, overwrite, fingerprints: As in ``FileWriter``.

    Raises:
        OSError: (in the future of ``write_data``) The store refuses a request, or cannot be reached; names the object.
        SaveInProgressError: Another save of this checkpoint committed first.
        UnknownOutcomeError: The store does not say whether the save is committed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        thread_count: int | None = None,
        *,
        overwrite: bool = True,
        fingerprints: bool = False,
    ) -> None:
        if not is_in_object_store(url):
            raise WrongValueError(
                f"ObjectWriter: got {os.fspath(url)!r}, expected a URL such as 's3://bucket/run/step-100'; install "
                "torchtitan-ext[remote]"
            )
        super().__init__(url, thread_count=thread_count, overwrite=overwrite, fingerprints=fingerprints)

    def _go_to(self, path: str | os.PathLike[str]) -> None:
        self.path = self.target = self._folder = Location(path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        save = begin_object_save(self._folder, self.save_id)
        self._save = save
        if save.replaces:
            if not self.overwrite:
                self.abandon()
                raise RuntimeError(
                    f"Checkpoint already exists: {self.path} has a checkpoint; pass overwrite=True or another folder"
                )
            warn(f"the checkpoint in {self.path} is overwritten")
        return [
            dataclasses.replace(plan, storage_data=ObjectPrefix(f"__{rank}_", self.save_id))
            for rank, plan in enumerate(plans)
        ]

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _core.RankFile | None:
        items = writes_of(plan)
        if not items:
            return None
        to: ObjectPrefix = plan.storage_data
        name = data_name(to.prefix, to.save_id)
        path, num_threads = os.fsencode(self._folder / name), thread_count_of(self.thread_count)
        records = _core.RecordWriter(path, BLOCK_BYTES, num_threads, False, to_memory=True)
        parts = _RecordParts(ObjectFolder(self._folder), name, records, tensor_bytes(items))
        try:
            self._write_records(records, parts.write_queued, items, planner)
            return parts.finish(to.save_id, self.rank or 0)
        except BaseException:
            parts.abandon()
            raise

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_in_object_store(checkpoint_id)


class _RecordParts:
    """Writes what a RecordWriter, which writes to memory, has queued, as one object: one put if it is small, else parts
    of 16 MiB or more.

    Takes memory for the parts on their way, 128 MiB, and for one more, which is filled meanwhile. A failure leaves the
    object absent, or with a part of its bytes; its key belongs to this save alone.

    Args:
        num_bytes: About how many bytes the object will have.
    """

    def __init__(self, folder: ObjectFolder, name: str, records: _core.RecordWriter, num_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._records = records
        self._part_bytes = max(_LEAST_PART_BYTES, 2 * num_bytes // _MAX_PARTS)
        max_parts = max(_LEAST_PARTS_AT_A_TIME, _BYTES_AT_A_TIME // self._part_bytes)
        self._parts = folder.open_parts(name, self._part_bytes, max_parts)

    def write_queued(self) -> None:
        while True:
            packed = np.empty(self._part_bytes, dtype=np.uint8)
            num_bytes = self._records.write_part(packed.ctypes.data, packed.nbytes)
            if num_bytes == 0:
                return
            self._write(packed[:num_bytes])

    def finish(self, save_id: str, rank: int) -> _core.RankFile:
        """Writes the footer, and waits until the store has all."""
        file = self._records.finish(self._name, bytes.fromhex(save_id), rank)
        self._write(self._records.rest)
        with self._folder.told(self._name):
            self._parts.close()
        return file

    def abandon(self) -> None:
        """Ends an upload that has failed. Parts that no object is made of could not be listed, and stay for ever."""
        try:
            self._parts.close()
        except Exception:
            pass

    def _write(self, content: bytes | np.ndarray) -> None:
        """Takes over the memory: it is not copied, and freed when the store has it."""
        with self._folder.told(self._name):
            self._parts.write(content)
