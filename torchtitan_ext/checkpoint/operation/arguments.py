"""Checks the arguments of ``save``, ``async_save`` and ``load`` on each rank, and that all ranks name one place.

A path with a time in it, or with another step, differs between ranks. But one directory may have several names: by
links, by mount points, from another working directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.errors import Problem, WrongValueError, argument_error, check_argument, differing
from torchtitan_ext.ranks.side_group import can_have_side_group
from torchtitan_ext.storage.checkpoint_files import is_local
from torchtitan_ext.storage.commit.branch import Branch
from torchtitan_ext.storage.commit.steps import StepPattern, folders_in_fallback, step_of
from torchtitan_ext.storage.runs.retention import Keep
from torchtitan_ext.storage.weights.writer import MAX_FILE_BYTES
from torchtitan_ext.transforms.rules import Transform

# A month: longer times overflow the timers of backends, which count in milliseconds.
_LONGEST_SECONDS = 30 * 24 * 3600


def check_save(operation: str, state_dict: Any, path: Any, planner: Any, storage_writer: Any, group: Any) -> None:
    """Raises TypeError or ValueError unless these are the arguments of a save."""
    _check_state_and_place(operation, state_dict, path, storage_writer)
    check_argument(operation, "planner", planner, (SavePlanner, NoneType), "a SavePlanner")
    expected = "a DCP storage writer, such as FileSystemWriter(path)"
    check_argument(operation, "storage_writer", storage_writer, (StorageWriter, NoneType), expected)
    _check_group(operation, group)


def check_load(state_dict: Any, path: Any, planner: Any, storage_reader: Any, group: Any, *, has_sources: bool) -> None:
    """Raises TypeError or ValueError unless these are the arguments of a load."""
    if has_sources and (path is not None or storage_reader is not None):
        raise ValueError("load: got sources and a path or storage_reader, expected one of them")
    _check_state_and_place("load", state_dict, path, storage_reader or has_sources)
    check_argument("load", "planner", planner, (LoadPlanner, NoneType), "a LoadPlanner")
    expected = "a DCP storage reader, such as FileSystemReader(path)"
    check_argument("load", "storage_reader", storage_reader, (StorageReader, NoneType), expected)
    _check_group("load", group)


def check_transform(transform: Any, sources: Sequence[Source]) -> None:
    """Raises TypeError or ValueError unless this is a transform of a load, or ``None``."""
    check_argument("load", "transform", transform, (Transform, NoneType), "a tte.transforms.Transform")
    if transform is not None and sources:
        raise WrongValueError("load: got a transform and sources; give it to them: Source(path, transform=...)")


def check_step(path: Any, step: Any, pattern: Any = None, fallback: Any = None) -> None:
    """Raises TypeError or ValueError unless this is a step of a run at ``path``, or ``None``."""
    _check_pattern("load", pattern)
    check_argument("load", "fallback", fallback, (str, os.PathLike, NoneType), "a directory")
    if step is None:
        if fallback is not None:
            raise ValueError(f"load: got fallback={str(fallback)!r} and no step, expected step='latest' or a number")
        if pattern is not None:
            raise ValueError(f"load: got step_pattern={pattern!r} and no step, expected step='latest' or a number")
        return
    if not (isinstance(step, int) and not isinstance(step, bool)) and step not in ("latest", "last-good"):
        raise argument_error("load", "step", step, "a number, 'latest' or 'last-good'")
    if path is None:
        raise ValueError(f"load: got step={step!r} without a path, expected the directory of the run")
    if step == "last-good" and not is_local(path):
        raise WrongValueError(
            f"load: got step='last-good' and {str(path)!r}, expected a directory: files at a URL have no checksums; "
            "pass step='latest' or a number"
        )


def checked_reuse(operation: str, reuse: Any, path: Any, storage_writer: Any) -> str | None:
    """An earlier checkpoint as an absolute path, "latest" or ``None``; raises TypeError or ValueError of all else."""
    check_argument(operation, "reuse", reuse, (str, os.PathLike, NoneType), 'a checkpoint or "latest"')
    if reuse is None:
        return None
    if storage_writer is not None:
        raise WrongValueError(
            f"{operation}: got reuse={str(reuse)!r} and a storage_writer; give it to the writer: FileWriter(path, "
            "reuse=...)"
        )
    for name, place in (("reuse", reuse), ("path", path)):
        if not is_local(place):
            raise WrongValueError(
                f"{operation}: got reuse={str(reuse)!r} and {name}={str(place)!r}, expected a directory: other storage "
                "has no links"
            )
    return "latest" if reuse == "latest" else os.path.abspath(reuse)


@dataclass(frozen=True)
class WeightsFormat:
    """How a save writes safetensors files: the arguments of ``tte.save``."""

    max_file_bytes: int
    transform: Transform | None = None


def checked_format(
    operation: str, format: Any, weights: WeightsFormat, path: Any, fallback: Any, others: Mapping[str, Any]
) -> WeightsFormat | None:
    """How safetensors are written; ``None`` for a checkpoint of DCP. Raises TypeError or ValueError of all else.

    Args:
        weights: As the caller gave it.
        others: Arguments that such a save has no use for; each must be empty then.
    """
    max_file_bytes, transform = weights.max_file_bytes, weights.transform
    if format not in ("dcp", "safetensors"):
        raise WrongValueError(f'{operation}: got format={format!r}, expected "dcp" or "safetensors"')
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int):
        raise argument_error(operation, "max_file_bytes", max_file_bytes, "a whole number")
    if max_file_bytes < 1:
        raise WrongValueError(f"{operation}: got max_file_bytes={max_file_bytes}, expected at least 1")
    check_argument(operation, "transform", transform, (Transform, NoneType), "a tte.transforms.Transform")
    if format == "dcp":
        if transform is not None:
            raise WrongValueError(
                f'{operation}: got a transform and format="dcp", expected format="safetensors"; save the state as it '
                "is, and transform it by a load, or by torchtitan-ext reshard --transform"
            )
        if max_file_bytes != MAX_FILE_BYTES:
            raise WrongValueError(
                f'{operation}: got max_file_bytes={max_file_bytes} and format="dcp", whose files each rank fills; '
                'leave it out, or pass format="safetensors"'
            )
        return None
    for name, value in others.items():
        if value:
            raise WrongValueError(
                f'{operation}: got format="safetensors" and {name}={value!r}, expected none: that is of checkpoints'
            )
    for name, place in (("the path ", path), ("fallback=", fallback)):
        if place is not None and not is_local(place):
            raise WrongValueError(
                f'{operation}: got format="safetensors" and {name}{str(place)!r}, expected a directory'
            )
    if path is not None and os.fspath(path).endswith(".safetensors"):
        raise WrongValueError(
            f'{operation}: got format="safetensors" and the path {str(path)!r}, expected a directory, in which the '
            "files are made; leave .safetensors out"
        )
    return weights


def check_branch(operation: str, branch: Any, path: Any, storage_writer: Any) -> None:
    """Raises ValueError unless this says what becomes of newer steps, for the writer that ``tte.save`` makes."""
    if branch not in get_args(Branch):
        raise WrongValueError(
            f"{operation}: got branch={branch!r}, expected {' or '.join(map(repr, get_args(Branch)))}"
        )
    if branch != "set_aside" and storage_writer is not None:
        raise WrongValueError(
            f"{operation}: got branch={branch!r} and a storage_writer; give it to the writer: FileWriter(path, "
            f"branch={branch!r})"
        )
    if branch == "error" and path is not None and not is_local(path):
        raise WrongValueError(
            f"{operation}: got branch='error' and {str(path)!r}, expected a directory: newer steps at a URL are not "
            "looked for, and stay"
        )


def check_keep(keep: Keep | None, path: str | os.PathLike[str] | None, pattern: Any = None, reuse: Any = None) -> None:
    """Raises TypeError or ValueError unless ``keep`` has numbers of steps and ``path`` is a step of a run."""
    _check_pattern("save", pattern)
    if keep is None:
        if pattern is not None and reuse != "latest":
            raise ValueError(f"save: got step_pattern={pattern!r} and no keep, expected how many steps stay")
        return
    for name, number in (("keep", keep.newest), ("keep_every", 1 if keep.every is None else keep.every)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise argument_error("save", name, number, "a whole number")
        if number < 1:
            raise ValueError(f"save: got {name}={number}, expected at least 1")
    if path is not None and not is_local(path):
        raise WrongValueError(
            f"save: got keep={keep.newest} and {str(path)!r}, expected a directory: steps at a URL are not removed; "
            "leave keep= out, and remove old ones by a rule of the storage or by hand"
        )
    if path is None or step_of(path, pattern) is None:
        name = "step-<number>" if pattern is None else pattern
        raise ValueError(f"save: got keep={keep.newest} and the path {str(path)!r}, expected a directory <run>/{name}")


def check_fingerprints(operation: str, fingerprints: Any, path: Any, storage_writer: Any) -> None:
    """Raises TypeError or ValueError unless this is a bool, and true only where our own files are written."""
    check_argument(operation, "fingerprints", fingerprints, bool, "True or False")
    if not fingerprints:
        return
    if storage_writer is not None:
        raise WrongValueError(
            f"{operation}: got fingerprints=True and a storage_writer; give it to the writer: "
            "FileWriter(path, fingerprints=True)"
        )
    if not is_local(path):
        raise WrongValueError(f"{operation}: got fingerprints=True and the path {str(path)!r}, expected a directory")


def _check_pattern(operation: str, pattern: Any) -> None:
    if pattern is not None:
        check_argument(operation, "step_pattern", pattern, str, "a name such as 'checkpoint-{step}'")
        StepPattern(pattern)


@dataclass(frozen=True)
class OnStorageError:
    """What becomes of a save that storage refuses on any rank: the arguments of ``tte.save``, checked.

    Errors of storage are those of the operating system: a full disk, a directory that is gone or read-only. Refusals,
    whose cause is the state, and lost ranks, whose group can do nothing more, are always raised.
    """

    action: Literal["raise", "warn"] = "raise"
    fallback: str | os.PathLike[str] | None = None
    retries: int = 0
    max_failures: int = 3

    def check(self, operation: str, path: object) -> None:
        if self.action not in ("raise", "warn"):
            raise WrongValueError(f'{operation}: got on_error={self.action!r}, expected "raise" or "warn"')
        for name, least in (("retries", 0), ("max_failures", 1)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise WrongValueError(
                    f"{operation}: got {name}={number!r}, expected a whole number of at least {least}"
                )
        if self.fallback is not None:
            check_argument(operation, "fallback", self.fallback, (str, os.PathLike), "a directory")
            if path is None:
                raise WrongValueError(
                    f"{operation}: got fallback={str(self.fallback)!r} and no path; give the path too"
                )

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

    def other_places(
        self, path: str | os.PathLike[str] | None, fallback: str | None
    ) -> list[str | os.PathLike[str] | None]:
        """Where a save at ``path``, whose place in the fallback directory is known, is tried again, in turn."""
        return [path] * self.retries + ([] if fallback is None else [fallback])


def check_can_send_from_cpu(operation: str, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError where a save in a thread has no way to send: no gloo beside the group, no CPU backend in it."""
    if not (dist.is_available() and dist.is_initialized()) or can_have_side_group(group):
        return
    used = group or dist.group.WORLD
    if not sends_from_cpu(used):
        devices = used._device_types  # type: ignore[union-attr]
        raise ValueError(
            f"{operation}: got a group for {', '.join(map(str, devices))}, expected one that can send from CPU memory; "
            "call init_process_group with 'cpu:gloo,cuda:nccl'"
        )


def sends_from_cpu(group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of a group take tensors of the host."""
    return torch.device("cpu") in group._device_types  # type: ignore[union-attr]


def check_seconds(operation: str, seconds: Any, argument: str = "timeout_seconds") -> None:
    """Raises TypeError or ValueError unless it is a number of seconds that backends can wait."""
    check_argument(operation, argument, seconds, Real, "a number of seconds")
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{operation}: got {argument}={seconds}, expected more than 0 and at most {_LONGEST_SECONDS:,}"
        )


def _check_state_and_place(operation: str, state_dict: Any, path: Any, storage: Any) -> None:
    if isinstance(path, Mapping) and isinstance(state_dict, (str, os.PathLike)):
        raise TypeError(f"{operation}: got the path first and the state dict second; exchange them")
    expected = "a dict such as {'model': model}"
    if isinstance(state_dict, nn.Module):
        expected = "a dict: {'model': model}, or model.state_dict()"
    check_argument(operation, "state_dict", state_dict, Mapping, expected)
    check_argument(operation, "path", path, (str, os.PathLike, NoneType), "a directory")
    if path is None and not storage:
        raise ValueError(f"{operation}: got neither a path nor storage, expected one of them")
    for key, value in state_dict.items():
        if isinstance(value, type) and hasattr(value, "state_dict"):
            raise TypeError(f"{operation}: got the class {value.__name__} for {key}, expected an instance of it")


def _check_group(operation: str, group: Any) -> None:
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER, where new_group gave this rank no part
        raise ValueError(f"{operation}: this rank is not in the process group; call it on the group's ranks only")
    check_argument(operation, "process_group", group, (dist.ProcessGroup, NoneType), "a process group")


_ONE_PATH = "pass the same path on every rank: make a name with a time or a step in it on one rank, and broadcast it"


@dataclass(frozen=True)
class Place:
    """Where a rank looks for a checkpoint.

    Attributes:
        path: Absolute path, or URL; empty where only the storage knows it.
        identity: Equal for all names of one directory on hosts that share it: inode of the nearest existing directory,
            and the path from there. ``None`` for a URL.
    """

    path: str
    identity: tuple[int, str] | None = None


def place_of(path: str | os.PathLike[str] | None) -> Place:
    """This rank's place of a checkpoint, which need not exist yet."""
    if path is None:
        return Place("")
    if not is_local(path):
        return Place(str(path).rstrip("/"))
    real = Path(os.path.realpath(path))
    for there in (real, *real.parents):
        try:
            return Place(str(real), (there.stat().st_ino, str(real.relative_to(there))))
        except OSError:
            continue
    return Place(str(real))


def place_problems(places: Sequence[Sequence[Place]]) -> list[Problem]:
    """A problem for each checkpoint that ranks look for in different places; ``places`` are those of each rank."""
    problems = []
    for of_ranks in zip(*places, strict=False):
        identities = {place.identity for place in of_ranks}
        if len(identities) > 1 or None in identities:
            problems += differing("path", [place.path for place in of_ranks], show=_path_text, advice=_ONE_PATH)
    return problems


def _path_text(path: str) -> str:
    return path or "no path"
