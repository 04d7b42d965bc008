"""What ``save``, ``async_save`` and ``load`` take, checked on each rank before any other hears of the call."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from numbers import Real
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.errors import argument_error, check_argument, described
from torchtitan_ext.ranks.side_group import can_have_side_group
from torchtitan_ext.state.plain_value import is_builtin_function

# A month: timers of the backends count in milliseconds.
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


def check_classes(operation: str, allow_classes: Any) -> None:
    """Raises TypeError unless these are classes, or functions that build values, which a load may call."""
    expected = "a list of classes"
    if isinstance(allow_classes, str):
        raise argument_error(operation, "allow_classes", allow_classes, expected)
    check_argument(operation, "allow_classes", allow_classes, Collection, expected)
    for one in allow_classes:
        name = f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"
        if not callable(one) or is_builtin_function(name):
            got = name if callable(one) else described(one)
            raise TypeError(f"{operation}: got {got} in allow_classes, expected classes")


def check_can_send_from_cpu(operation: str, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError where a save in a thread can send neither beside a group nor from CPU memory over it."""
    if not (dist.is_available() and dist.is_initialized()) or can_have_side_group():
        return
    devices = (group or dist.group.WORLD)._device_types  # type: ignore[union-attr]
    if torch.device("cpu") not in devices:
        raise ValueError(
            f"{operation}: got a group for {', '.join(map(str, devices))}, expected one that can send from CPU memory; "
            "call init_process_group with 'cpu:gloo,cuda:nccl'"
        )


def check_seconds(operation: str, timeout_seconds: Any) -> None:
    """Raises TypeError or ValueError unless it is a time to wait."""
    check_argument(operation, "timeout_seconds", timeout_seconds, Real, "a number of seconds")
    if not 0 < timeout_seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{operation}: got timeout_seconds={timeout_seconds}, expected more than 0 and at most {_LONGEST_SECONDS:,}"
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
