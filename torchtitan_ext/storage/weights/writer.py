"""A storage writer of safetensors files: each rank writes the runs of its boxes to their places in the final files."""

from __future__ import annotations

import dataclasses
import os
import resource
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from torchtitan_ext import _core, clock
from torchtitan_ext.errors import DamagedCheckpointError, Problem, WrongValueError, argument_error, refusal, warn
from torchtitan_ext.storage.checkpoint_files import safetensors_paths, sync_directory, thread_count_of
from torchtitan_ext.storage.commit.commit import NotSharedError
from torchtitan_ext.storage.commit.staged_target import staged_target
from torchtitan_ext.storage.formats.safetensors_files import NewSafetensors, SafetensorsEntry
from torchtitan_ext.storage.formats.sparse_files import sync_files
from torchtitan_ext.storage.formats.weights_directory import refuse_irreplaceable, replace_weights
from torchtitan_ext.storage.futures import finished
from torchtitan_ext.storage.location import is_local
from torchtitan_ext.storage.native.file_writer import CountsRequests, ask_nobody
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.weights.boxes import PlacedBoxes
from torchtitan_ext.storage.weights.layout import file_names, find_places, lay_out_weights, make_weights
from torchtitan_ext.storage.weights.one_writer import OneWriterPerFile, WriterRanks
from torchtitan_ext.storage.weights.placed import FilePart, SameTensors, TensorForms, WeightsMap, plain_value

MAX_FILE_BYTES = 5 * 10**9
"""Of the tensors of one file: what Hugging Face's libraries take by default."""

# The coordinator makes the files before any rank looks for them; some network file systems show them later.
_SHOWN_SECONDS = 10.0

# Open in a process beside those that it writes: libraries, connections, data loaders.
_OTHER_FILES = 200


Entries = dict[str, tuple[Path, SafetensorsEntry]]
"""Where tensors lie, by name."""


@dataclass
class WeightsMeta(StorageMeta):
    """Tells a planner that nothing but plain tensors can be written, except where a transform makes others of them."""

    has_transform: bool = False


@dataclass(frozen=True)
class StagedWeights:
    """What a rank has to know of the files, which have their headers already.

    Attributes:
        directory: Where they are, seen from the directory of the target.
        known: What a ``WeightsMap`` has to know of all ranks.
    """

    directory: str
    num_files: int
    known: bytes
    has_one_writer: bool


class SafetensorsWriter(StorageWriter):
    """Writes safetensors files for ``tte.save``, whatever the layout: no gather, no second pass.

    The coordinator makes the files with their headers, in a directory beside the target; each rank writes the runs of
    its boxes to their places; then the files come into the target, the index last (``replace_weights``). Other
    files of the target stay, such as a tokenizer.

    Args:
        path: Directory of the files; made if it is missing.
        max_file_bytes: The most bytes of tensors in a file; one that is larger gets a file of its own.
        file_numbers: In which file each tensor lies, instead of that.
        one_writer_per_file: Whether all bytes of a file go through one rank, because many small writes of several ranks
            are slow or unsafe; by default on file systems of other machines and on FUSE. Not so beside training
            (``tte.async_save``), where the ranks have no group for it, and not where theirs sends no host memory.
        weights_map: How the state's tensors become those of the files, where these are others.
        sync: Wait until all files are on the disk.
        thread_count: Threads of each rank; by default its share of the cores, at most 8.

    Attributes:
        target: The absolute path.
        confirm: As in ``FileWriter``.
        ranks: How ranks send each other bytes, where they can; ``tte.save`` sets it on all ranks when it plans.

    Raises:
        StateRefusedError: Values that are no tensors, or dtypes that the format lacks; nothing was written.
        OSError: (in the future of ``write_data``) A file cannot be written; names the file, the byte and the reason.
        SaveInProgressError: Another save runs in the same place.
        FileExistsError: The directory holds a checkpoint of DCP, or the path is that of a file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        file_numbers: dict[str, int] | None = None,
        one_writer_per_file: bool | None = None,
        weights_map: WeightsMap | None = None,
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
        self.one_writer_per_file = one_writer_per_file
        self.has_transform = weights_map is not None
        self._map = weights_map or SameTensors()
        self.sync = sync
        self.thread_count = thread_count
        self.save_id = ""
        self.rank = 0
        self.ranks: WriterRanks | None = None
        self.confirm: Callable[[], None] = ask_nobody
        self._is_coordinator = False
        self._planner: Any = None
        self._metadata: Metadata | None = None
        self._tied: dict[str, str] = {}
        self._one_writer: OneWriterPerFile | None = None
        self._staged: ExitStack | None = None
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        # The save belongs to the process that holds its lock.
        return {**vars(self), "_staged": None, "_one_writer": None, "confirm": ask_nobody}

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
        self.ranks = None
        self.confirm = ask_nobody
        self._is_coordinator = is_coordinator
        self._metadata = None
        self._one_writer = None

    def take_metadata(self, metadata: Metadata, planner: object) -> None:
        """Gives the coordinator what ``prepare_global_plan`` lays out; ``tte.save`` calls it before."""
        self._metadata = metadata
        self._tied = getattr(planner, "tied", {})

    def follow(self, planner: SavePlanner) -> None:
        """Takes the metadata from the planner of a ``dcp.save``: what its last global plan was made with."""
        self._planner = planner

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        files, known = self._lay_out()
        target = Path(os.path.realpath(self.target))
        if target.exists() and not target.is_dir():
            raise FileExistsError(f"{target} is a file, expected a directory for the weights; give another path")
        if target.is_dir():
            refuse_irreplaceable(target)
            if safetensors_paths(target):
                warn(f"the weights in {self.path} are replaced")

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
            self._files = make_weights(files, self._directory)
            self._staged = staged.pop_all()
        has_one_writer = self.one_writer_per_file
        if has_one_writer is None:
            has_one_writer = _core.is_on_network(os.fsencode(self._directory))
        has_one_writer &= self.ranks is not None and self.ranks.size > 1
        if has_one_writer and self.ranks is not None:
            _check_open_files(len(files), self.ranks.size)
        directory = os.path.relpath(self._directory, target.parent)
        data = StagedWeights(directory, len(files), known, has_one_writer)
        return [dataclasses.replace(plan, storage_data=data) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        return finished(lambda: self._write(plan, planner))

    def finish(self, metadata: Metadata, results: Sequence[int]) -> None:  # type: ignore[override]
        assert self._staged is not None, "finish without prepare_global_plan, please report"
        staged, self._staged = self._staged, None
        staged.close()

    def abandon(self) -> None:
        """Removes the files of a save that has failed on all ranks; acts on the coordinator."""
        staged, self._staged = self._staged, None
        if staged is not None:
            with suppress(_AbandonedError), staged:
                raise _AbandonedError

    def storage_meta(self) -> StorageMeta:
        meta = WeightsMeta(checkpoint_id=self.path, save_id=self.save_id)
        meta.has_transform = self.has_transform
        return meta

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    def _lay_out(self) -> tuple[dict[str, NewSafetensors], bytes]:
        """The files, and what the ``WeightsMap`` has to know of all ranks."""
        if self._metadata is None and self._planner is not None:
            self.take_metadata(self._planner.metadata, self._planner)
        if self._metadata is None:
            raise WrongValueError("a SafetensorsWriter needs the metadata of all ranks: save with tte.save")
        forms, known = self._map.forms(self._metadata)
        self._check_numbers(forms)
        return lay_out_weights(forms, self.max_file_bytes, self.file_numbers, self._tied), known

    def _check_numbers(self, forms: TensorForms) -> None:
        if self.file_numbers is not None:
            missing = [fqn for fqn in forms if fqn not in self.file_numbers]
            detail = "has no number of a file; give it one in file_numbers"
            if missing:
                raise refusal("save", [Problem("unsupported_tensor", fqn, detail) for fqn in missing])

    def _write(self, plan: SavePlan, planner: SavePlanner) -> int:
        """Returns the bytes of tensors that this rank has written."""
        staged: StagedWeights = plan.storage_data
        one_writer = self._one_writer_of(staged)
        if not plan.items and one_writer is None:
            return 0
        places = self._map.places(plan.items, staged.known)
        directory = Path(os.path.realpath(self.target)).parent / staged.directory
        paths = [directory / name for name in file_names(staged.num_files)]
        names = dict.fromkeys(part.fqn for parts in places.values() for part in parts)
        entries = self._find_entries(directory, staged.num_files, names, () if one_writer is None else paths)
        num_bytes = sum(item.tensor_storage_size() or 0 for item in plan.items)
        with (
            progress(
                "save, rank 0", is_coordinator=self._is_coordinator, total_bytes=lambda: num_bytes, in_logs=False
            ) as advance,
            PlacedBoxes(
                thread_count_of(self.thread_count),
                num_bytes,
                advance,
                sync=self.sync,
                paths=paths,
                one_writer=one_writer,
            ) as boxes,
        ):
            # In the order of the files, so that neighbours are written by one call.
            items = sorted(plan.items, key=lambda item: _order(entries.get(item.index.fqn)))
            for part, values in _parts_of(items, places, planner):
                boxes.add(part, values, *entries[part.fqn])
            boxes.write()
            return boxes.num_bytes

    def refuse(self, plan: SavePlan) -> None:
        """This rank has failed before or in ``write_data``: the others do not wait for what it would send them."""
        one_writer = self._one_writer_of(plan.storage_data)
        if one_writer is not None:
            one_writer.refuse()

    def _one_writer_of(self, staged: StagedWeights) -> OneWriterPerFile | None:
        if not staged.has_one_writer or self.ranks is None:
            return None
        if self._one_writer is None:
            self._one_writer = OneWriterPerFile(self.ranks, staged.num_files)
        return self._one_writer

    def _find_entries(self, directory: Path, num_files: int, fqns: Iterable[str], paths: Iterable[Path]) -> Entries:
        """Where these tensors lie. These files are there then, too.

        Raises:
            NotSharedError: This rank does not see the files.
        """
        deadline = clock.now() + _SHOWN_SECONDS
        while True:
            try:
                for path in paths:
                    path.stat()
                return find_places(directory, fqns, num_files=num_files)
            except (FileNotFoundError, DamagedCheckpointError) as error:
                if clock.now() > deadline:
                    raise NotSharedError(
                        f"{self.path} is not in a shared directory: rank {self.rank} does not see what the coordinator "
                        "wrote there; save to a file system that all ranks have"
                    ) from error
            clock.sleep(0.05)


def _parts_of(
    items: Iterable[WriteItem], places: Mapping[MetadataIndex, Sequence[FilePart]], planner: SavePlanner
) -> Iterator[tuple[FilePart, torch.Tensor]]:
    """What of the items goes into the files."""
    for item in items:
        parts = places.get(item.index)
        if parts:
            raw = plain_value(item, planner.resolve_data(item))
            for part in parts:
                yield part, part.values(raw)
        elif isinstance(planner, CountsRequests):
            planner.expect_requests(-1)  # a transform drops it


class _AbandonedError(Exception):
    """Ends the block of a ``staged_target`` without putting it in place."""


def _check_open_files(num_files: int, num_ranks: int) -> None:
    """Refuses more files than the ranks can keep open, where each file has one writer."""
    most = num_ranks * (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES)
    if num_files > most:
        raise WrongValueError(
            f"save: got {num_files} safetensors files, expected at most {most} of {num_ranks} rank(s) with "
            "their limits of open files; pass a larger max_file_bytes, or raise the limit (ulimit -n)"
        )


def _order(place: tuple[Path, SafetensorsEntry] | None) -> tuple[str, int]:
    return ("", 0) if place is None else (place[0].name, place[1].begin)
