"""A storage writer of safetensors files: each rank writes the runs of its boxes to their places in the final files."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, WrongValueError, argument_error, refusal
from torchtitan_ext.state.host_copies import row_major_boxes
from torchtitan_ext.storage.checkpoint_files import is_local, sync_directory, thread_count_of
from torchtitan_ext.storage.commit.commit import NotSharedError
from torchtitan_ext.storage.commit.staged_target import staged_target
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry, safetensors_paths
from torchtitan_ext.storage.formats.sparse_files import sync_files
from torchtitan_ext.storage.formats.weights_directory import refuse_irreplaceable, replace_weights
from torchtitan_ext.storage.futures import finished
from torchtitan_ext.storage.native.device_buckets import OutgoingBuckets, bucket_bytes_of
from torchtitan_ext.storage.native.file_writer import WritesInPortions
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.raw_tensor import dtype_name, raw_memory
from torchtitan_ext.storage.weights.layout import (
    dtype_problem,
    find_places,
    lay_out_weights,
    make_weights,
    name_problems,
    value_problem,
)

MAX_FILE_BYTES = 5 * 10**9
"""Of the tensors of one file: what Hugging Face's libraries take by default."""

# What a planner may copy for the save is freed after so many bytes. The buckets of an accelerator, of which there are
# two, have as many together.
_BATCH_BYTES = 64 << 20

# A process may have 1,024 files open.
_MAX_OPEN_FILES = 200

# The coordinator makes the files before any rank looks for them; some network file systems show them later.
_SHOWN_SECONDS = 10.0


class WeightsMeta(StorageMeta):
    """Tells a planner that nothing but plain tensors can be written."""


@dataclass(frozen=True)
class StagedWeights:
    """What a rank is told of the files, which have their headers already.

    Attributes:
        directory: Where they are, seen from the directory of the target.
    """

    directory: str
    num_files: int


@dataclass(frozen=True)
class WrittenWeights:
    """What one rank has written of tensors."""

    num_bytes: int


class SafetensorsWriter(StorageWriter):
    """Writes safetensors files for ``tte.save``, whatever the layout: no gather, no second pass.

    The coordinator makes the files with their headers, in a directory beside the target; each rank writes the runs of
    its boxes to their places; then the files come into the target, the index last (``replace_weights``). Other
    files of the target stay, such as a tokenizer.

    Args:
        path: Directory of the files; made if it is missing.
        max_file_bytes: The most bytes of tensors in a file; one that is larger gets a file of its own.
        file_numbers: In which file each tensor lies, instead of that.
        sync: Wait until all files are on the disk.
        thread_count: Threads of each rank; by default its share of the cores, at most 8.

    Attributes:
        target: The absolute path.
        confirm: As in ``FileWriter``.

    Raises:
        StateRefusedError: Values that are no tensors, or dtypes that the format lacks; nothing was written.
        OSError: (in the future of ``write_data``) A file cannot be written; names the file, the byte and the reason.
        SaveInProgressError: Another save runs in the same place.
        FileExistsError: The directory holds a checkpoint of DCP.
    """

    not_reused = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        file_numbers: dict[str, int] | None = None,
        sync: bool = True,
        thread_count: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int):
            raise argument_error("save", "max_file_bytes", max_file_bytes, "a whole number")
        if max_file_bytes < 1:
            raise WrongValueError(f"save: got max_file_bytes={max_file_bytes}, expected at least 1")
        thread_count_of(thread_count)
        self.max_file_bytes = max_file_bytes
        self.file_numbers = file_numbers
        self.sync = sync
        self.thread_count = thread_count
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        # The save belongs to the process that holds its lock.
        return {**vars(self), "_staged": None, "confirm": _ask_nobody}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.abandon()
        if checkpoint_id:
            self.path = Path(checkpoint_id)
            self.target = self.path.absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise WrongValueError("save: got use_collectives=False, expected True: safetensors files are of all ranks")
        self.save_id = uuid.uuid4().hex
        self.rank = kwargs.get("rank") or 0
        self.confirm = _ask_nobody
        self._is_coordinator = is_coordinator
        self._metadata: Metadata | None = None

    def take_metadata(self, metadata: Metadata) -> None:
        """Gives the coordinator what ``prepare_global_plan`` lays out; ``tte.save`` calls it before."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        if self._metadata is None:
            raise WrongValueError("a SafetensorsWriter needs the metadata of all ranks: save with tte.save")
        weights = lay_out_weights(
            _tensors_of(self._metadata, self.file_numbers), self.max_file_bytes, self.file_numbers
        )
        target = Path(os.path.realpath(self.target))
        if target.is_dir():
            refuse_irreplaceable(target)
            if safetensors_paths(target):
                warnings.warn(f"the weights in {self.path} are replaced", stacklevel=2)

        def put_in_place(_: Path, replaced: Path) -> None:
            sync_files(self._files if self.sync else [])
            sync_directory(self._directory)
            self.confirm()
            replace_weights(self._directory, replaced)

        with ExitStack() as staged:
            stage = staged.enter_context(staged_target(target, put_in_place))
            stage.mkdir()
            # A name that no rank has seen before: a network file system may show it files of another save.
            self._directory = stage / self.save_id
            self._files = make_weights(weights, self._directory)
            self._staged: ExitStack | None = staged.pop_all()
        told = StagedWeights(os.path.relpath(self._directory, target.parent), len(weights.files))
        return [dataclasses.replace(plan, storage_data=told) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        return finished(lambda: self._write(plan, planner))

    def finish(self, metadata: Metadata, results: Sequence[WrittenWeights]) -> None:  # type: ignore[override]
        assert self._staged is not None, "finish without prepare_global_plan, please report"
        staged, self._staged = self._staged, None
        staged.close()

    def abandon(self) -> None:
        """Removes the files of a save that has failed on all ranks; acts on the coordinator."""
        staged, self._staged = getattr(self, "_staged", None), None
        if staged is not None:
            try:
                with staged:
                    raise _AbandonedError
            except _AbandonedError:
                pass

    def storage_meta(self) -> StorageMeta:
        return WeightsMeta(checkpoint_id=self.path, save_id=getattr(self, "save_id", None))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WrittenWeights:
        places = self._find_places(plan)
        num_bytes = sum(item.tensor_storage_size() or 0 for item in plan.items)
        with progress(
            "save, rank 0", is_coordinator=self._is_coordinator, total_bytes=lambda: num_bytes, in_logs=False
        ) as advance:
            boxes = _Boxes(places, thread_count_of(self.thread_count), advance, num_bytes, sync=self.sync)
            try:
                for portion in planner.portions(plan.items) if isinstance(planner, WritesInPortions) else [plan.items]:
                    # In the order of the files, so that neighbours are written by one call.
                    for item in sorted(portion, key=lambda item: _place_of(item, places)):
                        boxes.add(item, planner.resolve_data(item))
                    boxes.write()
                boxes.finish()
            finally:
                boxes.clear()
        return WrittenWeights(num_bytes)

    def _find_places(self, plan: SavePlan) -> dict[str, tuple[Path, SafetensorsEntry]]:
        """Where the tensors of this rank's items lie.

        Raises:
            NotSharedError: This rank does not see the files.
        """
        if not plan.items:
            return {}
        told: StagedWeights = plan.storage_data
        directory = Path(os.path.realpath(self.target)).parent / told.directory
        fqns = dict.fromkeys(item.index.fqn for item in plan.items)
        deadline = time.monotonic() + _SHOWN_SECONDS
        while True:
            try:
                return find_places(directory, fqns, num_files=told.num_files)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise NotSharedError(
                        f"{self.path} is not in a shared directory: rank {self.rank} does not see what the coordinator "
                        "wrote there; save to a file system that all ranks have"
                    ) from None
            time.sleep(0.05)


class _AbandonedError(Exception):
    """Ends the block of a ``staged_target`` without putting it in place."""


class _Boxes:
    """Queues boxes, and keeps their memory alive until they are written."""

    def __init__(
        self,
        places: dict[str, tuple[Path, SafetensorsEntry]],
        num_threads: int,
        advance: Callable[[int], object],
        num_bytes: int,
        *,
        sync: bool,
    ) -> None:
        self._places = places
        self._num_threads = num_threads
        self._advance = advance
        self._num_bytes = num_bytes
        self._sync = sync
        self._runs = _core.RunWriter()
        self._files: dict[Path, int] = {}
        self._held: list[torch.Tensor] = []
        self._held_bytes = 0
        self._buckets: OutgoingBuckets | None = None

    def add(self, item: WriteItem, value: torch.Tensor | io.BytesIO) -> None:
        fqn = item.index.fqn
        raw = None if isinstance(value, io.BytesIO) else raw_memory(value.detach())
        path, entry = self._places[fqn]
        if raw is None or dtype_name(raw.dtype) != entry.dtype or item.tensor_data is None:
            what = "no tensor" if isinstance(value, io.BytesIO) else f"a {type(value).__name__} of {value.dtype}"
            problem = f"the planner gave {what}, and a plain tensor of {entry.dtype} belongs into the file"
            raise refusal("save", [Problem("unsupported_tensor", fqn, problem)])
        if raw.numel() == 0:
            return
        stored = _core.StoredTensor(entry.dtype, entry.sizes, None, entry.begin)
        offsets = tuple(item.tensor_data.chunk.offsets)
        if raw.is_cpu:
            self._runs.add_box(self._file(path), stored, offsets, raw.shape, raw.data_ptr(), raw.stride())
            self._held.append(raw)
            self._held_bytes += raw.nbytes
        else:
            self._add_of_device(path, stored, offsets, raw)
        if self._held_bytes >= _BATCH_BYTES:
            self._write_queued()

    def write(self) -> None:
        if self._buckets is not None:
            self._buckets.finish()
        self._write_queued()

    def finish(self) -> None:
        """Waits until what was written is on the disk."""
        self._runs.finish(self._num_threads, self._sync)
        self._files = {}

    def clear(self) -> None:
        """Frees buffers and tensors without the garbage collector: the buckets know this object."""
        self._buckets = None
        self._held.clear()

    def _add_of_device(
        self, path: Path, stored: _core.StoredTensor, offsets: tuple[int, ...], raw: torch.Tensor
    ) -> None:
        bucket_bytes = min(bucket_bytes_of(self._num_bytes), _BATCH_BYTES // 2)
        if self._buckets is None:
            self._buckets = OutgoingBuckets(bucket_bytes, self._write_queued)
        for inside, part in row_major_boxes(raw, bucket_bytes // raw.element_size()):
            begin = tuple(map(sum, zip(offsets, inside, strict=True)))
            self._buckets.add(part, functools.partial(self._add_packed, path, stored, begin, part.shape))

    def _add_packed(
        self,
        path: Path,
        stored: _core.StoredTensor,
        offsets: tuple[int, ...],
        sizes: torch.Size,
        address: int,
        num_bytes: int,
    ) -> None:
        strides = torch.empty(sizes, dtype=torch.uint8, device="meta").stride()
        self._runs.add_box(self._file(path), stored, offsets, sizes, address, strides)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self._write_queued()
                self.finish()
            self._files[path] = self._runs.add_file(os.fsencode(path), path.stat().st_size)
        return self._files[path]

    def _write_queued(self) -> None:
        num_bytes = self._runs.queued_bytes
        self._runs.write(self._num_threads, self._sync)
        self._held.clear()
        self._held_bytes = 0
        self._advance(num_bytes)


def _tensors_of(metadata: Metadata, file_numbers: dict[str, int] | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the tensors of a save.

    Raises:
        StateRefusedError: The format cannot hold something; all problems.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    problems = name_problems(metadata.state_dict_metadata)
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(value_problem(fqn))
            continue
        tensors[fqn] = (dtype_name(entry.properties.dtype), tuple(entry.size))
        if (problem := dtype_problem(fqn, tensors[fqn][0])) is not None:
            problems.append(problem)
        if file_numbers is not None and fqn not in file_numbers:
            problems.append(Problem("unsupported_tensor", fqn, "has no number of a file; give it one in file_numbers"))
    if problems:
        raise refusal("save", problems)
    return tensors


def _place_of(item: WriteItem, places: dict[str, tuple[Path, SafetensorsEntry]]) -> tuple[str, int]:
    path, entry = places[item.index.fqn]
    return path.name, entry.begin


def _ask_nobody() -> None:
    """Confirms a save of ``dcp.save``."""
