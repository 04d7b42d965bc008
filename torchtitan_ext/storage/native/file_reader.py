"""A storage reader for ``dcp.load``: reads only the wanted bytes, straight into their targets, and verifies them."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import ExtensionRegistry
from torchtitan_ext.errors import DamagedCheckpointError, SavedOverError, warn
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.commit.branch import remember_step
from torchtitan_ext.storage.commit.opened import Footers
from torchtitan_ext.storage.futures import finished
from torchtitan_ext.storage.location import is_plain_url, place_at
from torchtitan_ext.storage.metadata.lazy_metadata import PROPERTIES, columns_behind
from torchtitan_ext.storage.metadata.metadata_file import metadata_of
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata, read_index_beside, read_without_index
from torchtitan_ext.storage.native.device_buckets import bucket_bytes_of
from torchtitan_ext.storage.native.open_files import OpenFiles
from torchtitan_ext.storage.native.planned_items import ForeseenPlan, ListedReads, reads_of
from torchtitan_ext.storage.native.read_batch import ReadBatch
from torchtitan_ext.storage.native.verified_files import VerifiedFiles, Verify
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.raw_tensor import DTYPES


@dataclass(frozen=True)
class MetadataMark:
    """Names the metadata from which a rank made its plan; part of the plan.

    Attributes:
        place: Where the files lie: ranks of one place must have opened the same. Empty: all ranks must.
        blocks: To the coordinator: the ledger of the blocks that this rank is going to read; empty if it does not know.
        part: From the coordinator: which of them this rank verifies; ``None``: all.
    """

    digest: str
    place: tuple[str, ...] = ()
    blocks: bytes = b""
    part: Sequence[_core.BlockRange] | None = None


class FileReader(VerifiedFiles, StorageReader):
    """Drop-in for ``FileSystemReader``, as ``storage_reader=`` to ``dcp.load`` or ``tte.load``; for any planner.

    Reads checkpoints of ``FileWriter`` and of stock ``FileSystemWriter``. If stock has saved over one of ours, it is
    read as stock's, with a warning.

    Args:
        path: Directory of the checkpoint, or its URL in an object store.
        verify: Which blocks are compared with their checksums, in files that have any: ``"auto"`` each block of which
            anything is read, once in a load: with ``tte.load`` by one of the ranks, else by each rank that reads of it;
            ``"all"`` each block in each read of each rank; ``"none"`` none. A block is read whole to be compared.
        thread_count: Threads of each rank; by default its share of the cores, at most 8.
        _extension_registry: Accepted like in ``FileSystemReader`` and ignored: records that were saved through an
            extension are refused.

    Raises:
        DamagedCheckpointError: Bytes differ from those that were written; names the file, the tensors and their rows.
            Targets may be partly overwritten.
        SavedOverError: Another save has replaced the checkpoint meanwhile. ``tte.load`` then begins again.
        OSError: A file cannot be read.
    """

    _of_different_saves = "ranks have read the metadata of different saves"
    _saved: SavedMetadata | None
    _mark: MetadataMark | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        verify: Verify = "auto",
        *,
        thread_count: int | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        if verify not in ("auto", "all", "none"):
            raise ValueError(f"FileReader: got verify={verify!r}, expected 'auto', 'all' or 'none'")
        super().__init__(place_at(path), verify, thread_count)
        self.load_id = uuid.uuid4().hex
        self.storage_data: dict[Any, Any] = {}
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = place_at(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self._forget()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._forget()
        self._saved = read_without_index(self.files, kwargs.get("rank"), verify=self.verify, properties=PROPERTIES)
        self._index, self.metadata_digest = self._saved.index, self._saved.digest
        metadata = metadata_of(self._saved)
        assert metadata.storage_meta is not None, "metadata without the fields of StorageMeta, please report"
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        save_id = getattr(metadata.storage_meta, "save_id", None)
        self._footers = Footers(save_id)
        if metadata.storage_data is None:
            raise ValueError(f"FileReader: the metadata of {self.path} does not say where its records lie")
        self.storage_data = metadata.storage_data
        self._is_coordinator = is_coordinator
        if self._saved is None:
            return
        rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        if rank is None:  # else each rank has read its own
            self._mark = MetadataMark(self.metadata_digest)
        if self._index is not None:  # it stands for the metadata
            return
        self._index = read_index_beside(self.files, rank, self._saved, self.verify)
        self._saved = None
        if self._index is None and self.verify != "none" and self._footers.are_expected:
            text = "has no index, so no checksums of .metadata: its data files are verified by their own footers"
            warn(f"{self.path} {text}")
        elif self._index is None and self.verify == "all":
            warn(f"{self.path} has no checksums: nothing of it can be verified")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.files.hold(self.storage_data[item.storage_index].relative_path for item in plan.items)
        if isinstance(self.path, Path):
            remember_step(self.path)
        if self._mark is None:
            return plan
        items = plan.foresee() if isinstance(plan, ForeseenPlan) else plan.items
        blocks = self._foreseen_blocks(items) if items and self.verify == "auto" and _has_other_ranks() else b""
        return dataclasses.replace(plan, storage_data=dataclasses.replace(self._mark, blocks=blocks))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        marks = [plan.storage_data for plan in plans if isinstance(plan.storage_data, MetadataMark)]
        if len({mark.place for mark in marks}) < len({(mark.place, mark.digest) for mark in marks}):
            raise SavedOverError(str(self.path), self._of_different_saves)
        if len(marks) < len(plans) or not all(mark.blocks for mark in marks):
            return plans
        parts = _core.deal_blocks([mark.blocks for mark in marks])
        return [
            dataclasses.replace(plan, storage_data=MetadataMark(mark.digest, part=part))
            for plan, mark, part in zip(plans, marks, parts, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[Any]:
        def read() -> None:
            try:
                if isinstance(plan.storage_data, MetadataMark) and plan.storage_data.part is not None:
                    self._blocks.take_part(list(plan.storage_data.part))
                self._read(plan, planner)
                if self.verify == "auto" and not self.leaves_blocks:
                    self.verify_blocks(self._blocks.unverified())
            except (_core.FormatError, UnicodeDecodeError) as error:
                raise DamagedCheckpointError(str(error)) from None

        return finished(read)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return not is_plain_url(checkpoint_id)

    def are_plain(self, indices: Sequence[MetadataIndex]) -> list[bool]:
        """Whether parts of these chunks can be read alone; else only ``torch.load`` can read their records."""
        try:
            return [record.tensor is not None for record in self.find_records(indices)]
        except (_core.FormatError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(str(error)) from None

    def read_box(self, index: MetadataIndex, offsets: Sequence[int], place: torch.Tensor) -> None:
        """Fills a CPU tensor with the part of a chunk at these offsets, without a plan.

        Raises:
            DamagedCheckpointError: Bytes differ from those that were written; or the chunk is no plain tensor of that
                dtype.
            OSError: A file cannot be read.
        """
        (record,) = self.find_records([index])
        if record.tensor is None or DTYPES[record.tensor.dtype] != place.dtype:
            raise DamagedCheckpointError(f"{self.path / record.file}: {index.fqn} is not saved as {place.dtype}")
        files = OpenFiles(self)
        files.add_box(record.file, record.tensor, offsets, place.shape, place.data_ptr(), place.stride())
        files.read()

    @property
    def files_reader(self) -> FileReader:
        """The reader of the files: this one, unless a transform lies between."""
        return self

    def _forget(self) -> None:
        super()._forget()
        # Digest of the file that the metadata was read from: equal on ranks that see the same checkpoint.
        self.metadata_digest = ""
        # Bytes of the wanted items since the metadata was read, without gaps between them.
        self.num_bytes_read = 0
        self._saved = None
        self._mark = None

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        items = reads_of(plan)
        reads = self._list(items)

        def total() -> int:
            return reads.num_bytes

        with progress("load, rank 0", is_coordinator=self._is_coordinator, total_bytes=total, in_logs=False) as advance:

            def count(num_bytes: int) -> None:
                self.num_bytes_read += num_bytes
                advance(num_bytes)

            batch = ReadBatch(planner, self, count, lambda: bucket_bytes_of(total()))
            batch.add_list(items, reads)
            batch.finish()

    def _foreseen_blocks(self, items: Sequence[ReadItem]) -> bytes:
        """The ledger of the blocks that a read of these items touches; empty where a file is not as it should be."""
        self._blocks = _core.BlockLedger()
        try:
            reads = self._list(items)
            for file, name in enumerate(reads.files):
                runs = _core.RunReader()
                reads.touch(runs, self.open_file(runs, name), file)
                runs.touch()
        except (_core.FormatError, UnicodeDecodeError, OSError, ValueError):
            self._blocks = _core.BlockLedger()
            return b""  # the read says what is wrong
        return self.describe_blocks()

    def _list(self, items: Sequence[ReadItem]) -> _core.ReadList:
        """The items with their records."""
        columns = columns_behind(self.storage_data)
        if columns is None:
            tensors = [item.storage_index for item in items if item.type != LoadItemType.BYTE_IO]
            found = iter(self.find_records(tensors))
            records = [
                Record(*self._place_of(item.storage_index), None) if item.type == LoadItemType.BYTE_IO else next(found)
                for item in items
            ]
            return _core.ReadList(list(items), LoadItemType.BYTE_IO, records)
        if isinstance(items, ListedReads) and items.columns is columns:
            reads = items.with_records()
        else:
            reads = _core.ReadList(list(items), LoadItemType.BYTE_IO, columns)
        if reads.lost is not None:
            self._place_of(items[reads.lost].storage_index)  # raises
        for file, name in enumerate(reads.files):
            reads.set_tensors(file, self._tensors_of(name, reads.records(file)))
        return reads

    def _place_of(self, key: Any) -> tuple[str, int, int]:
        info = self.storage_data[key]
        self._refuse_extension(key.fqn, getattr(info, "transform_descriptors", None))
        return info.relative_path, info.offset, info.length

    def _parts(self) -> Iterable[_core.Part]:
        for place, info in self.storage_data.items():
            yield _core.Part(place.fqn, place.offset, info.relative_path, info.offset, info.length)


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
