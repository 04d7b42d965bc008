"""One save as its caller asks for it: where it writes, in which form, and what becomes of it where storage refuses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from torchtitan_ext.checkpoint.operation.arguments import check_group, check_pattern, check_state_and_place
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.errors import WrongValueError, check_argument, check_choice, check_count, value_error
from torchtitan_ext.storage.commit.steps import folders_in_fallback
from torchtitan_ext.storage.location import is_local, is_plain_url, is_url
from torchtitan_ext.storage.runs.retention import Keep
from torchtitan_ext.storage.weights.writer import MAX_FILE_BYTES
from torchtitan_ext.transforms.rules import Transform

OnError = Literal["raise", "warn"]


@dataclass(frozen=True)
class OnStorageError:
    """What becomes of a save that storage refuses on any rank: options of ``tte.CheckpointManager``.

    Errors of storage are those of the operating system: a full disk, a directory that is gone or read-only. Refusals,
    whose cause is the state, and lost ranks, whose group can do nothing more, are always raised.
    """

    on_error: OnError = "raise"
    fallback: str | os.PathLike[str] | None = None
    retries: int = 0
    max_failures: int = 3

    def check(self, operation: str) -> None:
        check_choice(operation, "on_error", self.on_error, OnError)
        for name, least in (("retries", 0), ("max_failures", 1)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise value_error(operation, name, number, f"a whole number of at least {least}")
        if self.fallback is not None:
            check_argument(operation, "fallback", self.fallback, (str, os.PathLike), "a directory")

    def __post_init__(self) -> None:
        # The working directory may be another one when an asynchronous save needs it.
        if isinstance(self.fallback, (str, os.PathLike)) and is_local(self.fallback):
            object.__setattr__(self, "fallback", os.path.abspath(self.fallback))

    def place_of(self, path: str | os.PathLike[str] | None) -> str | None:
        """Where the fallback of a checkpoint goes: under the same name in the run's folder of the other directory."""
        if self.fallback is None or path is None:
            return None
        path = os.path.abspath(path) if is_local(path) else os.fspath(path).rstrip("/")
        run, name = os.path.split(path)
        return os.path.join(folders_in_fallback(run, self.fallback)[0], name)

    def runs_of(self, path: str | os.PathLike[str] | None) -> tuple[Path, ...]:
        """The directories that may have steps of the run of a checkpoint, its folders in the fallback among them."""
        if path is None:
            return ()
        run = os.path.dirname(os.path.abspath(path)) if is_local(path) else os.path.dirname(os.fspath(path).rstrip("/"))
        folders = [] if self.fallback is None else folders_in_fallback(run, self.fallback)
        return tuple(Path(folder) for folder in (run, *folders) if is_local(folder))


@dataclass(frozen=True)
class SaveJob:
    """Where and how one save writes: the options of all calls that save.

    See ``tte.save``, ``tte.weights.save`` and ``tte.CheckpointManager``.

    Attributes:
        max_file_bytes, transform: How safetensors are written; a checkpoint of DCP has no use for them.
        sets_aside: Whether newer steps of the run move aside where it was set back.
        runs: The directories that may have steps of the run: that of the path, and its folders in the fallback.
        fallback_place: Where the coordinator writes what storage refuses at ``path``: ranks may know the run by
            different paths.
    """

    path: str | os.PathLike[str] | None = None
    storage_writer: StorageWriter | None = None
    planner: StockSavePlanner = field(default_factory=SavePlanner)
    keep: Keep | None = None
    step_pattern: str | None = None
    on_storage_error: OnStorageError = OnStorageError()
    fingerprints: bool = False
    format: Literal["dcp", "safetensors"] = "dcp"
    max_file_bytes: int = MAX_FILE_BYTES
    transform: Transform | None = None
    sets_aside: bool = True
    runs: tuple[Path, ...] = ()
    fallback_place: str | None = None

    def checked(self, operation: str, state_dict: Any, group: Any = None) -> SaveJob:
        """The job as a save needs it. Raises TypeError or ValueError of what is wrong with it, or with the state."""
        check_state_and_place(operation, state_dict, self.path, self.storage_writer)
        check_argument(operation, "planner", self.planner, StockSavePlanner, "a SavePlanner")
        expected = "a DCP storage writer, such as FileSystemWriter(path)"
        check_argument(operation, "storage_writer", self.storage_writer, (StorageWriter, NoneType), expected)
        check_group(operation, group)
        self.on_storage_error.check(operation)
        check_argument(operation, "fingerprints", self.fingerprints, bool, "True or False")
        self._check_options_of_files(operation)
        if self.format == "safetensors":
            self._check_weights(operation)
        check_pattern(operation, self.step_pattern)
        return replace(self, runs=self.on_storage_error.runs_of(self.path))

    @property
    def place(self) -> Any:
        """The path, or that of the storage, if it says."""
        return getattr(self.storage_writer, "path", None) if self.path is None else self.path

    def _check_options_of_files(self, operation: str) -> None:
        """Raises ValueError of options that only our own files in a directory have."""
        if self.storage_writer is not None and self.fingerprints:
            raise WrongValueError(
                f"{operation}: got fingerprints=True and a storage_writer; give it to the writer: FileWriter(path, "
                "fingerprints=True)"
            )
        removes = "steps at this URL are not removed; leave keep= out, and remove old ones by a rule of the storage"
        keep = f"keep={self.keep and self.keep.newest}"
        for is_asked, option, place, why in (
            (self.fingerprints, "fingerprints=True", self.path, "they stand in an index of our files"),
            (self.keep is not None, keep, self.path, removes),
        ):
            if is_asked and place is not None and is_plain_url(place):
                raise WrongValueError(f"{operation}: got {option} and {str(place)!r}, expected a directory: {why}")

    def _check_weights(self, operation: str) -> None:
        """Raises TypeError or ValueError unless safetensors can be written so, to this path."""
        check_count(operation, "max_file_bytes", self.max_file_bytes)
        check_argument(operation, "transform", self.transform, (Transform, NoneType), "a tte.transforms.Transform")
        if self.path is not None and is_url(self.path):
            raise WrongValueError(
                f"{operation}: got the path {str(self.path)!r}, expected a directory: safetensors files are not "
                "written to this URL"
            )
        if self.path is not None and os.fspath(self.path).endswith(".safetensors"):
            raise WrongValueError(
                f"{operation}: got the path {str(self.path)!r}, expected a directory, in which the files are made; "
                "leave .safetensors out"
            )
