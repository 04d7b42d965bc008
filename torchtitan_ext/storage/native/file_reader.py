"""A storage reader for ``dcp.load``: reads only the wanted bytes, straight into their targets, and verifies them."""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import ExtensionRegistry
from torchtitan_ext.errors import DamagedCheckpointError, SavedOverError, warn
from torchtitan_ext.storage.checkpoint_files import (
    Record,
    describe_damage,
    find_stock_tensors,
    is_local,
    shown,
    thread_count_of,
)
from torchtitan_ext.storage.commit.branch import remember_step
from torchtitan_ext.storage.commit.opened import Footers, OpenedCheckpoint
from torchtitan_ext.storage.futures import finished
from torchtitan_ext.storage.metadata.lazy_metadata import PROPERTIES
from torchtitan_ext.storage.metadata.metadata_file import metadata_of
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata, read_index_beside, read_without_index
from torchtitan_ext.storage.native.device_buckets import bucket_bytes_of
from torchtitan_ext.storage.native.fills import OpenFiles
from torchtitan_ext.storage.native.read_batch import ReadBatch
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.raw_tensor import DTYPES

Verify = Literal["auto", "all", "none"]


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


@dataclass
class ForeseenPlan(LoadPlan):
    """A local plan without items that says what its rank will probably read, where the coordinator decides the items.

    It travels without that.
    """

    foresee: Callable[[], list[ReadItem]] = list

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, (self.items, self.storage_data, self.planner_data)


class FileReader(StorageReader):
    """Drop-in for ``FileSystemReader``, as ``storage_reader=`` to ``dcp.load`` or ``tte.load``; for any planner.

    Reads checkpoints of ``FileWriter`` and of stock ``FileSystemWriter``. If stock has saved over one of ours, it is
    read as stock's, with a warning.

    Args:
        path: Directory of the checkpoint.
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
    _opened: OpenedCheckpoint | None
    _saved: SavedMetadata | None
    _mark: MetadataMark | None
    _index: _core.Index | None
    _footers: Footers
    _stock_tensors: dict[tuple[str, int], _core.StoredTensor | None]
    _blocks: _core.BlockLedger

    def __init__(
        self,
        path: str | os.PathLike[str],
        verify: Verify = "auto",
        *,
        thread_count: int | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        if verify not in ("auto", "all", "none"):
            raise ValueError(f"FileReader: got verify={verify!r}, expected 'auto', 'all' or 'none'")
        self.path = Path(path)
        self.verify = verify
        self.thread_count = thread_count
        thread_count_of(thread_count)
        self.load_id = uuid.uuid4().hex
        self.storage_data: dict[Any, Any] = {}
        self.leaves_blocks = False
        """Whether blocks of which little is read are left to ``verify_blocks``: the ranks of the load share them."""
        self._is_coordinator = False
        self._forget()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)
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
    def files(self) -> OpenedCheckpoint:
        """The files of the checkpoint that was opened first; later saves do not change them."""
        if self._opened is None:
            self._opened = OpenedCheckpoint(self.path)
        return self._opened

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        """Where chunks of tensors lie, for reads without a plan."""
        infos = [self._info_of(index) for index in indices]
        places: dict[str, dict[int, int]] = {}
        for info in infos:
            places.setdefault(info.relative_path, {})[info.offset] = info.length
        tensors = {name: self._tensors_of(name, of_file) for name, of_file in places.items()}
        return [_record_of(info, tensors[info.relative_path].get(info.offset)) for info in infos]

    def are_plain(self, indices: Sequence[MetadataIndex]) -> list[bool]:
        """Whether parts of these chunks can be read alone; else only ``torch.load`` can read their records."""
        try:
            return [record.tensor is not None for record in self.find_records(indices)]
        except (_core.FormatError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(str(error)) from None

    @property
    def has_sums(self) -> bool:
        """Whether the save took sums of its records; from ``set_up_storage_reader`` on."""
        return self._index is not None and self._index.has_sums

    def find_sums(self, indices: Sequence[MetadataIndex]) -> list[int | None]:
        """The stored sums of chunks of tensors; ``None`` of those that have none."""
        infos = [self._info_of(index) for index in indices]
        if self._index is None:
            return [None] * len(infos)
        sum_of = self._index.sum_of
        pairs = zip(indices, infos, strict=True)
        return [sum_of(info.relative_path, info.offset, index.fqn) for index, info in pairs]

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

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        """Adds a file with its checksums to a RunReader, and returns its number there.

        Raises:
            FormatError: The file is not the one that the index names, or its footer is damaged. Without an index: the
                file is ours and has no footer, or belongs to another save.
            OSError: The file cannot be read.
        """
        path, descriptor = shown(self.path / name), self.files.descriptor(name)
        indexed = None if self._index is None else self._index.files.get(name)
        if self.verify == "none":
            return runs.add_file(path, -1 if indexed is None else indexed.num_bytes, descriptor)
        file = indexed or self._footers.find(self.path / name, descriptor)
        if file is None:
            return runs.add_file(path, -1, descriptor)
        save_id = b"" if self._index is None else self._index.save_id
        return runs.add_checked_file(path, file, save_id, descriptor, self._blocks)

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        """Reads all that was added to a RunReader.

        Args:
            names: Names of the files, by their numbers.

        Raises:
            DamagedCheckpointError: Blocks do not match their checksums.
        """
        auto = "mostly" if self.leaves_blocks else "once"
        damaged = runs.read(thread_count_of(self.thread_count), auto if self.verify == "auto" else self.verify)
        if damaged:
            blocks = [(names[block.file], block.begin, block.end) for block in damaged]
            parts = (
                _core.Part(place.fqn, place.offset, info.relative_path, info.offset, info.length)
                for place, info in self.storage_data.items()
            )
            text = describe_damage(self.path, blocks, parts, self._index)
            raise DamagedCheckpointError(
                text, "; storage_reader=FileReader(path, verify='none') takes the bytes as they are"
            )

    @property
    def has_unverified_blocks(self) -> bool:
        """Whether this reader has left blocks: touched, not verified."""
        return self.verify == "auto" and bool(self._blocks.unverified())

    def describe_blocks(self) -> bytes:
        """What this reader did with the blocks of the files, for ``_core.deal_blocks`` over all ranks."""
        return self._blocks.message(self.files.copy)

    def verify_blocks(self, ranges: Sequence[_core.BlockRange]) -> None:
        """Reads blocks, and compares them with their checksums.

        Raises:
            DamagedCheckpointError: Blocks do not match their checksums.
            OSError: A file cannot be read.
        """
        for name, of_file in groupby(ranges, key=lambda one: one.file):
            runs = _core.RunReader()
            file = self.open_file(runs, name)
            for one in of_file:
                runs.add_blocks(file, one.first, one.last)
            self.read_runs(runs, [name])

    @property
    def files_reader(self) -> FileReader:
        """The reader of the files: this one, unless a transform lies between."""
        return self

    def _forget(self) -> None:
        # Digest of the file that the metadata was read from: equal on ranks that see the same checkpoint.
        self.metadata_digest = ""
        # Bytes of the wanted items since the metadata was read, without gaps between them.
        self.num_bytes_read = 0
        self._opened = None
        self._saved = None
        self._mark = None
        self._index = None
        self._footers = Footers(None)
        self._stock_tensors = {}
        self._blocks = _core.BlockLedger()

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        records = self._records_of(plan.items)
        total = functools.partial(_wanted_bytes, records)
        with progress("load, rank 0", is_coordinator=self._is_coordinator, total_bytes=total, in_logs=False) as advance:

            def count(num_bytes: int) -> None:
                self.num_bytes_read += num_bytes
                advance(num_bytes)

            batch = ReadBatch(planner, self, count, lambda: bucket_bytes_of(total()))
            for item, record in records:
                batch.add(item, record)
            batch.finish()

    def _foreseen_blocks(self, items: Sequence[ReadItem]) -> bytes:
        """The ledger of the blocks that a read of these items touches; empty where a file is not as it should be."""
        self._blocks = _core.BlockLedger()
        try:
            for name, of_file in groupby(self._records_of(items), key=lambda pair: pair[1].file):
                runs = _core.RunReader()
                file = self.open_file(runs, name)
                for item, record in of_file:
                    tensor = record.tensor
                    if tensor is None or not tensor.is_row_major:
                        runs.add_bytes(file, record.offset, record.num_bytes, 0)
                    else:
                        runs.add_box(file, tensor, item.storage_offsets, item.lengths, 0, tensor.strides)
                runs.touch()
        except (_core.FormatError, UnicodeDecodeError, OSError, ValueError):
            self._blocks = _core.BlockLedger()
            return b""  # the read says what is wrong
        return self.describe_blocks()

    def _records_of(self, items: Sequence[ReadItem]) -> list[tuple[ReadItem, Record]]:
        """The items with their records, file by file in the order of their first items."""
        tensors = [item.storage_index for item in items if item.type != LoadItemType.BYTE_IO]
        found = iter(self.find_records(tensors))
        by_file: dict[str, list[tuple[ReadItem, Record]]] = {}
        for item in items:
            is_value = item.type == LoadItemType.BYTE_IO
            record = _record_of(self._info_of(item.storage_index), None) if is_value else next(found)
            by_file.setdefault(record.file, []).append((item, record))
        return [pair for of_file in by_file.values() for pair in of_file]

    def _info_of(self, index: MetadataIndex) -> Any:
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{index.fqn} was saved through an extension ({info.transform_descriptors}); "
                "load it with FileSystemReader"
            )
        return info

    def _tensors_of(self, name: str, places: Mapping[int, int]) -> dict[int, _core.StoredTensor]:
        """The plain tensors among some records of a file, by the records' offsets; ``places`` has their lengths."""
        if self._index is not None and name in self._index.files:
            return self._index.tensors(name)
        new = {offset: length for offset, length in places.items() if (name, offset) not in self._stock_tensors}
        num_threads, descriptor = thread_count_of(self.thread_count), self.files.descriptor(name)
        for offset, tensor in find_stock_tensors(self.path / name, new, num_threads, descriptor).items():
            self._stock_tensors[name, offset] = tensor
        known = {offset: self._stock_tensors[name, offset] for offset in places}
        return {offset: tensor for offset, tensor in known.items() if tensor is not None}


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _record_of(info: Any, tensor: _core.StoredTensor | None) -> Record:
    return Record(info.relative_path, info.offset, info.length, tensor)


def _wanted_bytes(records: Sequence[tuple[ReadItem, Record]]) -> int:
    return sum(
        record.num_bytes if record.tensor is None else item.lengths.numel() * record.tensor.item_bytes
        for item, record in records
    )
