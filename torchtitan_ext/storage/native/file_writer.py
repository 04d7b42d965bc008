"""A storage writer for ``dcp.save``: DCP's files, written in C++ from where the tensors lie, with checksums."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import StreamTransformExtension
from torchtitan_ext.errors import WrongValueError, only_printed, warn
from torchtitan_ext.layout.wrapper import without_slack
from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES, index_path, metadata_path, thread_count_of
from torchtitan_ext.storage.commit.branch import (
    PlaceInRun,
    last_name,
    notes_of_place,
    place_in_run,
    remember_step,
    set_aside,
)
from torchtitan_ext.storage.commit.commit import begin_save, encode_index, find_place, notes_of_save
from torchtitan_ext.storage.futures import finished
from torchtitan_ext.storage.location import Place, is_local
from torchtitan_ext.storage.metadata.metadata_file import encode_metadata, send_as_place
from torchtitan_ext.storage.metadata.saved_metadata import DCP_VERSION
from torchtitan_ext.storage.native.device_buckets import OutgoingBuckets, bucket_bytes_of
from torchtitan_ext.storage.native.planned_items import ListedWrites, writes_of
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES, raw_memory

# Pickled values and copies that a planner makes for the save are freed after so many bytes.
BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class FilePrefix:
    """The beginning of the names of a rank's files."""

    prefix: str


@runtime_checkable
class CountsRequests(Protocol):
    """A planner that counts the requests for its items, and lets go of the state after the last one."""

    def expect_requests(self, num_more: int) -> None: ...


@runtime_checkable
class HasLocalSources(CountsRequests, Protocol):
    """A planner that need not be asked for items of its list whose boxes lie in tensors that it gives beforehand."""

    def local_sources(self, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """Of these keys the local tensors on the CPU that are plain memory of a dtype of ``ELEMENT_TYPES``."""
        ...


class CommitsSaves(Protocol):
    """A save that has begun: ``RunningSave``, or one into an object store."""

    def check_names(self, names: Sequence[str]) -> None: ...

    def commit(self, index: bytes, metadata: bytes, *, sync: bool, confirm: Callable[[], None]) -> Place: ...

    def abandon(self) -> None: ...


class FileWriter(StorageWriter):
    """Drop-in for ``FileSystemWriter``, as ``storage_writer=`` to ``dcp.save`` or ``tte.save``; for any planner.

    Writes files for stock ``FileSystemReader``, and an index and checksums for ``FileReader``; see docs/format.md. A
    checkpoint at the path stays whole until the new one is (docs/reference/storage.md).

    Args:
        path: Directory of the checkpoint; made if it is missing.
        sync: Wait until all files are on the disk. Without it the save still survives a kill of the process, but a
            machine that fails soon after may lose this checkpoint and the one that it replaced.
        thread_count: Threads of each rank; by default its share of the cores, at most 8.
        overwrite: Whether the save may replace an old checkpoint.
        fingerprints: Take a fingerprint of each saved chunk while it is written, into the index: ``tte.load`` with
            ``prove=True`` compares what it has loaded with them. The names of the files have the save id then.
        step_pattern: How the run names its steps, of which newer ones are set aside.
        sync_files: The name of ``sync`` in ``FileSystemWriter``.
        per_thread_copy_ahead: Accepted like in ``FileSystemWriter`` and ignored: tensors of an accelerator come to the
            host in buckets, each while the one before is written.
        single_file_per_rank, cache_staged_state_dict, serialization_format, _extensions: Accepted like in
            ``FileSystemWriter``, with their defaults only.

    Attributes:
        target: The absolute path: the working directory may have changed when an asynchronous save begins.
        confirm: Called when all files are on the disk, right before the rename that commits. If it raises, nothing is
            committed. Each ``set_up_storage_writer`` resets it.
        seconds: What each phase has taken so far, for the index; reset too.

    Raises:
        OSError: (in the future of ``write_data``) A file cannot be written; names the file, the byte and the reason.
        SaveInProgressError: Another save runs in the same place.
        RuntimeError: There is a checkpoint, and ``overwrite`` is false; or not all ranks share the directory.
        WrongValueError: An argument of ``FileSystemWriter`` has a value that is not supported, or ``dcp.save`` got
            ``use_collectives=False``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sync: bool = True,
        thread_count: int | None = None,
        *,
        overwrite: bool = True,
        fingerprints: bool = False,
        step_pattern: str | None = None,
        sync_files: bool | None = None,
        single_file_per_rank: bool = True,
        per_thread_copy_ahead: int | None = None,
        cache_staged_state_dict: bool = False,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        super().__init__()
        if sync_files and not sync:
            raise _not_followed("sync=False, sync_files", True, "False: both say whether files are synced")
        if not single_file_per_rank:
            raise _not_followed(
                "single_file_per_rank", single_file_per_rank, "True: an index has one file of each rank"
            )
        if cache_staged_state_dict:
            detail = "False: this writer stages nothing; pass async_stager= to dcp.async_save, or call tte.async_save"
            raise _not_followed("cache_staged_state_dict", cache_staged_state_dict, detail)
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            detail = "SerializationFormat.TORCH_SAVE; for safetensors save with HuggingFaceStorageWriter"
            raise _not_followed("serialization_format", serialization_format, detail)
        if _extensions:
            detail = "none: they change the bytes of records, whose places this writer works out beforehand"
            raise _not_followed("_extensions", _extensions, detail)
        self._go_to(path)
        self.sync = sync if sync_files is None else sync_files
        self.overwrite = overwrite
        self.step_pattern = step_pattern
        self.sets_aside = True
        self.beside: tuple[Path, ...] = ()
        self._last_name = last_name(self.target)
        self._place_at_begin: PlaceInRun | None = None
        self.fingerprints = fingerprints
        self.thread_count = thread_count
        thread_count_of(thread_count)
        self.save_id = uuid.uuid4().hex
        self._has_named_a_save = False
        self.rank: int | None = None
        self.confirm: Callable[[], None] = ask_nobody
        self.seconds: Callable[[], Mapping[str, float]] = dict
        self._is_coordinator = False
        self._save: CommitsSaves | None = None

    def _go_to(self, path: str | os.PathLike[str]) -> None:
        self.path: Place = Path(path)
        self.target: Place = self.path.absolute()

    def __getstate__(self) -> dict[str, Any]:
        # The save belongs to the process that holds its lock, and each copy saves under an id of its own.
        return {**vars(self), "_save": None, "_has_named_a_save": True, "confirm": ask_nobody, "seconds": dict}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.abandon()
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self._last_name = last_name(self.target)
        self.save_id = uuid.uuid4().hex
        self._has_named_a_save = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise WrongValueError(
                "save: got use_collectives=False, expected True: an index is of all ranks; give dcp.save the planner "
                "and DCP's FileSystemWriter"
            )
        # ``dcp.save`` resets a writer only if it gets a path; files of two saves must not have the same names.
        if self._has_named_a_save:
            self.save_id = uuid.uuid4().hex
        self._has_named_a_save = True
        self._is_coordinator = is_coordinator
        self.confirm, self.seconds = ask_nobody, dict
        self.rank = kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if metadata_path(self._directory, None).exists() or index_path(self._directory, None).exists():
            if not self.overwrite:
                raise RuntimeError(
                    f"Checkpoint already exists: {self.path} has a checkpoint; pass overwrite=True or another directory"
                )
            if self._is_coordinator:
                warn(f"the checkpoint in {self.path} is overwritten")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        # Steps of other jobs that are saved meanwhile are none that this save leaves behind.
        self._place_at_begin = None
        if self.sets_aside:
            self._place_at_begin = place_in_run(self._directory, self.step_pattern, self._last_name, self.beside)
        self._save = begin_save(self._directory, self.save_id, names_have_id=self.fingerprints)
        return [dataclasses.replace(plan, storage_data=FilePrefix(f"__{rank}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        return finished(lambda: self._write(plan, planner))

    def finish(self, metadata: Metadata, results: Sequence[_core.RankFile | None]) -> None:  # type: ignore[override]
        assert self._save is not None, "finish without prepare_global_plan, please report"
        files = [file for file in results if file is not None]
        self._save.check_names([file.name for file in files])
        metadata.version = DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        content = encode_metadata(metadata, files)
        place = self._place_at_begin
        notes = notes_of_save(len(results), self.seconds()) + notes_of_place(place)
        index = encode_index(self.save_id, files, content, notes, has_sums=self.fingerprints)
        path = self._save.commit(index, content, sync=self.sync, confirm=self.confirm)
        self._save = None
        if isinstance(path, Path):
            remember_step(self._directory)
            send_as_place(metadata, path, content)
        if place is not None and place.newer:
            with only_printed():
                set_aside(place, self.save_id, sync=self.sync)

    def abandon(self) -> None:
        """Removes the files of a save that has failed on all ranks. ``tte.save`` calls it on every rank; it acts on the
        coordinator. After a failed ``dcp.save`` the next save does the same."""
        if self._save is not None:
            self._save.abandon()
            self._save = None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    @property
    def _directory(self) -> Path:
        """The target of a writer to a file system."""
        assert isinstance(self.target, Path), f"{self.target} is no directory, please report"
        return self.target

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _core.RankFile | None:
        # Plans do not carry the save id: a cached plan would bring back an old one.
        place = find_place(self._directory, self.rank or 0)
        items = writes_of(plan)
        if not items:
            return None
        name = place.data_name(plan.storage_data.prefix)
        path, num_threads = os.fsencode(place.directory / name), thread_count_of(self.thread_count)
        records = _core.RecordWriter(path, BLOCK_BYTES, num_threads, self.sync)
        self._write_records(records, records.write_queued, items, planner)
        return records.finish(name, bytes.fromhex(place.save_id), self.rank or 0)

    def _write_records(
        self,
        records: _core.RecordWriter,
        write_queued: Callable[[], None],
        items: Sequence[WriteItem],
        planner: SavePlanner,
    ) -> None:
        """Queues the records of all items, and has them written from time to time."""
        if not isinstance(items, ListedWrites):
            items = values_first(items)
        with progress(
            "save, rank 0",
            is_coordinator=self._is_coordinator,
            total_bytes=lambda: tensor_bytes(items),
            in_logs=False,
        ) as advance:
            batch = _Batch(
                records,
                write_queued,
                advance,
                lambda: bucket_bytes_of(tensor_bytes(items)),
                takes_sums=self.fingerprints,
            )
            done, add_straight = 0, batch.straight(items, planner)
            while done < len(items):
                first = done
                done = add_straight(first)
                if done == first:
                    item = items[done]
                    value = planner.resolve_data(item)
                    if isinstance(value, io.BytesIO):
                        batch.add_value(item, value)
                    else:
                        batch.add_tensor(item, value.detach())
                    done += 1
                if batch.held_bytes >= BATCH_BYTES:
                    batch.write()
            batch.write()


def values_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    """As stock writes them: planners may count on it."""
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def _not_followed(argument: str, got: object, expected: str) -> WrongValueError:
    return WrongValueError(f"FileWriter: got {argument}={got!r}, expected {expected}")


def ask_nobody() -> None:
    """Confirms a save of ``dcp.save``; ``tte.save`` asks whether other ranks have given up."""


class _Batch:
    """Queues records, and keeps their memory alive until they are written.

    Args:
        write_queued: Writes what is queued.
        advance: Called with each number of written bytes.
        bucket_bytes: Called once if there are tensors of an accelerator, for the size of their buckets.
        takes_sums: Whether the sum of each tensor is taken, while it is written: of the bytes that the file gets.
    """

    def __init__(
        self,
        records: _core.RecordWriter,
        write_queued: Callable[[], None],
        advance: Callable[[int], object],
        bucket_bytes: Callable[[], int],
        *,
        takes_sums: bool,
    ) -> None:
        self._records = records
        self._held: list[Any] = []
        # Not a method: the buffers of buckets are freed with this object, without the garbage collector.
        self._write_queued = partial(_write_queued, records, write_queued, self._held, advance)
        self._bucket_bytes = bucket_bytes
        self._takes_sums = takes_sums
        self._buckets: OutgoingBuckets | None = None
        self._waiting_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of the host: queued, or to be queued behind tensors of an accelerator."""
        return self._records.queued_bytes + self._waiting_bytes

    def straight(self, items: Sequence[WriteItem], planner: SavePlanner) -> Callable[[int], int]:
        """Adds items from a position on, as far as the planner need not be asked for them; returns the position of the
        first one that was not added."""
        if not isinstance(planner, HasLocalSources) or not isinstance(items, ListedWrites):
            return lambda first: first
        sources = planner.local_sources(set(items.in_core.fqns))

        def add(first: int) -> int:
            if self._buckets is not None:  # these would have to wait behind tensors of an accelerator
                return first
            room = BATCH_BYTES - self.held_bytes
            done = items.in_core.queue(self._records, first, room, sources, self._takes_sums)
            planner.expect_requests(first - done)
            return done

        return add

    def add_value(self, item: WriteItem, value: io.BytesIO) -> None:
        content = np.frombuffer(value.getbuffer(), dtype=np.uint8)
        offsets = item.index.offset
        sizes = () if offsets is None else (0,) * len(offsets)
        key = (item.index.fqn, offsets, item.index.index)
        self._in_turn(content, lambda: self._records.add_record(key, "", sizes, content.ctypes.data, content.nbytes))

    def add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        raw = raw_memory(tensor)
        if raw is None:
            self.add_value(item, _saved_by_torch(tensor))
            return
        key = (item.index.fqn, item.index.offset, item.index.index)
        name, element_type = NAMES[raw.dtype], ELEMENT_TYPES[raw.dtype]
        global_sizes = item.tensor_data.size if self._takes_sums and item.tensor_data is not None else None
        if raw.is_cpu:
            address, shape, strides = raw.data_ptr(), raw.shape, raw.stride()
            self._in_turn(
                raw,
                lambda: self._records.add_tensor(key, name, shape, element_type, address, strides, global_sizes),
            )
            return
        if self._buckets is None:
            self._buckets = OutgoingBuckets(self._bucket_bytes(), self._write_queued)
        shape = raw.shape
        self._buckets.then(lambda: self._records.begin_tensor(key, name, shape, element_type, global_sizes))
        self._buckets.add(raw, self._records.add_bytes)
        self._buckets.then(self._records.end_tensor)

    def write(self) -> None:
        if self._buckets is not None:
            self._buckets.finish()
        self._write_queued()

    def _in_turn(self, held: Any, add: Callable[[], None]) -> None:
        """Adds a record of the host's memory, behind those of an accelerator that were added before."""
        if self._buckets is None:
            self._held.append(held)
            add()
            return

        self._waiting_bytes += held.nbytes

        def add_waiting() -> None:
            self._waiting_bytes -= held.nbytes
            self._held.append(held)
            add()

        self._buckets.then(add_waiting)


def _write_queued(
    records: _core.RecordWriter, write: Callable[[], None], held: list[Any], advance: Callable[[int], object]
) -> None:
    num_bytes = records.queued_bytes
    write()
    held.clear()
    advance(num_bytes)


def tensor_bytes(items: Sequence[WriteItem]) -> int:
    """The size of all tensors, without values and the frames of records."""
    if isinstance(items, ListedWrites):
        return items.in_core.num_bytes
    return sum(item.tensor_storage_size() or 0 for item in items)


def _saved_by_torch(tensor: torch.Tensor) -> io.BytesIO:
    """The record of a tensor that is not plain memory, without the rest of its storage."""
    stream = io.BytesIO()
    torch.save(without_slack(tensor.cpu()), stream)
    return stream
