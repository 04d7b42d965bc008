"""Checks the arguments of ``save``, ``async_save`` and ``load`` on each rank, and that all ranks name one place.

A path with a time in it, or with another step, differs between ranks. But one directory may have several names: by
links, by mount points, from another working directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.errors import Problem, WrongValueError, argument_error, check_argument, differing
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.ranks.side_group import can_have_side_group
from torchtitan_ext.storage.commit.steps import StepPattern
from torchtitan_ext.storage.location import is_local, is_plain_url
from torchtitan_ext.transforms.rules import Transform

# A month: longer times overflow the timers of backends, which count in milliseconds.
_LONGEST_SECONDS = 30 * 24 * 3600


def check_load(
    state_dict: Any, path: Any, source: Source | None, planner: Any, storage_reader: Any, transform: Any, group: Any
) -> None:
    """Raises TypeError or ValueError unless these are the arguments of a load; ``path`` is that of a source, if any."""
    check_argument("load", "transform", transform, (Transform, NoneType), "a tte.transforms.Transform")
    if source is not None and storage_reader is not None:
        raise ValueError("load: got a Source and a storage_reader; give it to that: Source(storage_reader=...)")
    if source is not None and transform is not None:
        raise WrongValueError("load: got a transform and a Source; give it to that: Source(path, transform=...)")
    check_state_and_place("load", state_dict, path, storage_reader or (source and source.storage_reader))
    check_argument("load", "planner", planner, (LoadPlanner, NoneType), "a LoadPlanner")
    expected = "a DCP storage reader, such as FileSystemReader(path)"
    check_argument("load", "storage_reader", storage_reader, (StorageReader, NoneType), expected)
    check_group("load", group)


def check_step(path: Any, step: Any, pattern: Any) -> None:
    """Raises TypeError or ValueError unless this is a step of a run at ``path``, or ``None``."""
    check_pattern("load", pattern)
    if step is None:
        if pattern is not None:
            raise ValueError(f"load: got step_pattern={pattern!r} and no step, expected step='latest' or a number")
        return
    if not (isinstance(step, int) and not isinstance(step, bool)) and step not in ("latest", "last-good"):
        raise argument_error("load", "step", step, "a number, 'latest' or 'last-good'")
    if path is None:
        raise ValueError(f"load: got step={step!r} without a path, expected the directory of the run")
    if step == "last-good" and is_plain_url(path):
        raise WrongValueError(
            f"load: got step='last-good' and {str(path)!r}, expected a directory: files at a URL have no checksums; "
            "pass step='latest' or a number"
        )


def check_pattern(operation: str, pattern: Any) -> None:
    """Raises TypeError or ValueError unless it is a name of steps, or ``None``."""
    if pattern is not None:
        check_argument(operation, "step_pattern", pattern, str, "a name such as 'checkpoint-{step}'")
        StepPattern(pattern)


def check_can_send_from_cpu(operation: str, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError where a save in a thread has no way to send: no gloo beside the group, no CPU backend in it."""
    if not (dist.is_available() and dist.is_initialized()) or can_have_side_group():
        return
    used = group or dist.group.WORLD
    if used is not None and not has_backend(used, "cpu"):
        raise ValueError(
            f"{operation}: got a group for {', '.join(map(str, used._device_types))}, expected one that can send from "
            "CPU memory; call init_process_group with 'cpu:gloo,cuda:nccl'"
        )


def check_seconds(operation: str, seconds: Any, argument: str = "timeout_seconds") -> None:
    """Raises TypeError or ValueError unless it is a number of seconds that backends can wait."""
    check_argument(operation, argument, seconds, Real, "a number of seconds")
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{operation}: got {argument}={seconds}, expected more than 0 and at most {_LONGEST_SECONDS:,}"
        )


def check_state_and_place(operation: str, state_dict: Any, path: Any, storage: Any) -> None:
    """Raises TypeError or ValueError unless these are a state dict, and a path or storage."""
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


def check_group(operation: str, group: Any) -> None:
    """Raises TypeError or ValueError unless it is a process group that this rank is in, or ``None``."""
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER, where new_group gave this rank no part
        raise ValueError(f"{operation}: this rank is not in the process group; call it on the group's ranks only")
    check_argument(operation, "process_group", group, (dist.ProcessGroup, NoneType), "a process group")


_ONE_PATH = "pass the same path on every rank: make a name with a time or a step in it on one rank, and broadcast it"


PlaceOfRank = tuple[str, tuple[int, str] | None]
"""Where a rank looks for a checkpoint: an absolute path, or URL, empty where only the storage knows it; and what is
equal for all names of one directory on hosts that share it: the inode of the nearest existing directory, and the path
from there; ``None`` for a URL."""


def place_of(path: str | os.PathLike[str] | None) -> PlaceOfRank:
    """This rank's place of a checkpoint, which need not exist yet."""
    if path is None:
        return "", None
    if not is_local(path):
        return str(path).rstrip("/"), None
    real = Path(os.path.realpath(path))
    for there in (real, *real.parents):
        try:
            return str(real), (there.stat().st_ino, str(real.relative_to(there)))
        except OSError:
            continue
    return str(real), None


def place_problems(places: Sequence[Sequence[PlaceOfRank]]) -> list[Problem]:
    """A problem for each checkpoint that ranks look for in different places; ``places`` are those of each rank."""
    problems = []
    for of_ranks in zip(*places, strict=False):
        identities = {identity for _, identity in of_ranks}
        if len(identities) > 1 or None in identities:
            problems += differing("path", [path or "no path" for path, _ in of_ranks], show=str, advice=_ONE_PATH)
    return problems
