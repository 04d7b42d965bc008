"""Options of ``save``, ``async_save`` and ``load`` until 0.2: they work, with a warning that shows the new call."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict

from torchtitan_ext.checkpoint.operation.save_job import OnStorageError, SaveJob
from torchtitan_ext.errors import WrongValueError, warn
from torchtitan_ext.storage.runs.retention import Keep
from torchtitan_ext.storage.weights.writer import MAX_FILE_BYTES
from torchtitan_ext.transforms.rules import Transform


class OldSaveOptions(TypedDict, total=False):
    """What moved to ``tte.CheckpointManager``, and, with ``format="safetensors"``, to ``tte.weights.save``."""

    keep: int | Keep | None
    on_error: Literal["raise", "warn"]
    fallback: str | os.PathLike[str] | None
    retries: int
    max_failures: int
    format: Literal["dcp", "safetensors"]
    max_file_bytes: int
    transform: Transform | None


class OldLoadOptions(TypedDict, total=False):
    """What moved to ``tte.CheckpointManager`` (``fallback``) and to ``LoadPlanner`` (``allow_classes``)."""

    fallback: str | os.PathLike[str] | None
    allow_classes: Collection[Callable[..., Any]]


def with_old_options(operation: str, job: SaveJob, old: Mapping[str, Any]) -> SaveJob:
    """The job with options of old. Raises TypeError of a name that was never one, ValueError of what never went."""
    _check_names(operation, old, OldSaveOptions)
    form = old.get("format", "dcp")
    of_weights = {name: old[name] for name in ("max_file_bytes", "transform") if name in old}
    if form not in ("dcp", "safetensors"):
        raise WrongValueError(f'{operation}: got format={form!r}, expected "dcp" or "safetensors"')
    if form == "safetensors":
        job = replace(job, format=form, **of_weights)
        called = "".join(f", {name}=..." for name in of_weights)
        _warn(operation, 'format="safetensors"', f"tte.weights.{operation}(state_dict, path{called})")
    elif of_weights.get("transform") is not None or of_weights.get("max_file_bytes", MAX_FILE_BYTES) != MAX_FILE_BYTES:
        raise WrongValueError(
            f"{operation}: got {' and '.join(of_weights)} for a checkpoint of DCP, expected safetensors: "
            f"tte.weights.{operation}(state_dict, path, ...); or save the state as it is, and transform it by a load, "
            "or by torchtitan-ext reshard --transform"
        )
    of_runs = {name: value for name, value in old.items() if name not in ("format", "max_file_bytes", "transform")}
    if of_runs:
        options = ", ".join(f"{name}=..." for name in of_runs)
        _warn(operation, " and ".join(of_runs), f"tte.CheckpointManager(run, {options})")
    soft = {one.name: of_runs[one.name] for one in fields(OnStorageError) if one.name in of_runs}
    return replace(job, keep=Keep.of(of_runs.get("keep")), on_storage_error=OnStorageError(**soft))


def note_old_load_options(old: Mapping[str, Any]) -> None:
    """Warns of options of old. Raises TypeError of a name that was never one."""
    _check_names("load", old, OldLoadOptions)
    if "fallback" in old:
        _warn("load", "fallback", "tte.CheckpointManager(run, fallback=...).resume(state)")
    if "allow_classes" in old:
        _warn("load", "allow_classes", "tte.load(state_dict, path, planner=tte.LoadPlanner(allow_classes=...))")


def _check_names(operation: str, old: Mapping[str, Any], known: type) -> None:
    for name in old:
        if name not in known.__annotations__:
            raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")


def _warn(operation: str, options: str, new: str) -> None:
    text = f"tte.{operation}: {options} since 0.2: {new}; see docs/use/migrate.md"
    warn(text, DeprecationWarning)
