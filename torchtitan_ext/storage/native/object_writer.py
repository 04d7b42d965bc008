"""A storage writer for object stores: the files of ``FileWriter`` as objects, committed by one conditional put."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchtitan_ext import _core
from torchtitan_ext.errors import WrongValueError, warn
from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES, data_name, thread_count_of
from torchtitan_ext.storage.location import Location, is_in_object_store
from torchtitan_ext.storage.native.file_writer import FilePrefix, FileWriter, tensor_bytes
from torchtitan_ext.storage.native.planned_items import writes_of
from torchtitan_ext.storage.objects.commit import begin_object_save
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.parts import RecordParts


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
        parts = RecordParts(ObjectFolder(self._folder), name, records, tensor_bytes(items))
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
