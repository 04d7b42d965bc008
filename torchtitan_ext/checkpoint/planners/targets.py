"""The targets of a load: their places in the nested state dict, and whether the saved values fit them.

Kind, shape, dtype and memory are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.rules.casts import FLOATS, CastPolicy, cast_problem, kind_of_number
from torchtitan_ext.checkpoint.rules.load_rules import LoadRules, WhyNotRead
from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.checkpoint.tables.key_table import (
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    lies_in_local,
)
from torchtitan_ext.dcp_private import ShardedTensor, flatten_sharded_tensors
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import describes_itself, holds_wrapper, local_tensor, may_overlap_itself
from torchtitan_ext.layout.layout import ShardReport
from torchtitan_ext.layout.wrapper import parts_of, why_not_materialized, why_not_whole
from torchtitan_ext.state.nested import FlatStateDict, Path, flat_keys, holds_shards
from torchtitan_ext.storage.metadata.lazy_metadata import columns_behind, is_saved_tensor


def flatten_targets(
    state_dict: dict[str, Any], saved: Mapping[str, Any], source: Source, *, nested: bool, sharded_tensors: bool
) -> FlatStateDict:
    """The targets by flat key; a container or wrapper that the checkpoint has as one value stays one value.

    ``nested`` and ``sharded_tensors`` are ``flatten_state_dict`` and ``flatten_sharded_tensors`` of the planner.
    """

    def is_saved_whole(fqn: str) -> bool:
        return is_saved_tensor(saved, source.saved_name(fqn)) is False

    def is_wrapper_whole(fqn: str, wrapper: torch.Tensor) -> bool:
        """As in the checkpoint; where the checkpoint lacks it, as we would save it."""
        if source.saved_name(fqn) in saved:
            return True
        is_walked = any(source.saved_name(f"{fqn}.{name}") in saved for name in parts_of(wrapper))
        return not is_walked and why_not_whole(wrapper, {}) is None

    if nested:
        flat = flat_keys(state_dict, is_opaque=is_saved_whole, is_whole=is_wrapper_whole)
    else:
        paths: dict[str, Path] = {fqn: (fqn,) for fqn in state_dict}
        flat = FlatStateDict(values=dict(state_dict), paths=paths, stock_paths=paths)
    if sharded_tensors and any(isinstance(value, ShardedTensor) for value in flat.values.values()):
        flat.values = flatten_sharded_tensors(flat.values)
    return flat


@dataclass(frozen=True)
class FittedTargets:
    """The targets of one rank, each in one of ``wanted`` and ``not_read``: see ``ReadRequest``.

    Attributes:
        numbers: For each Python number that was saved as a tensor, a tensor to read it into.
    """

    wanted: dict[str, KeyEntry]
    saved_names: dict[str, str]
    not_read: dict[str, WhyNotRead]
    numbers: dict[str, torch.Tensor]
    problems: list[Problem]


def fit_targets(
    targets: Mapping[str, Any], table: KeyTable, metadata: Metadata, rules: LoadRules, cast: CastPolicy
) -> FittedTargets:
    """Compares each target with the saved value of its key."""
    fitted = FittedTargets({}, {}, {}, {}, [])
    columns = None if rules.source.rename else columns_behind(metadata.state_dict_metadata)
    alike = set() if columns is None else _core.find_saved_alike(dict(table.entries), columns)
    loads_all = rules.loads_all
    for fqn, entry in table.entries.items():
        if fqn in alike and loads_all and not targets[fqn].is_meta and not may_overlap_itself(targets[fqn]):
            fitted.wanted[fqn] = entry
            continue
        if not rules.is_loaded(fqn, is_tensor=not isinstance(entry, ObjectEntry)):
            fitted.not_read[fqn] = "left"
            continue
        saved_name = rules.source.saved_name(fqn)
        saved = metadata.state_dict_metadata.get(saved_name)
        if saved is None:
            fitted.not_read[fqn] = "missing"
            continue
        problem = _find_misfit(fqn, targets[fqn], entry, saved, cast)
        if problem is not None:
            fitted.problems.append(problem)
            if problem.kind != "wrong_dtype":  # where only the dtype does not fit, all else is compared
                fitted.not_read[fqn] = "refused"
                continue
        if isinstance(saved, BytesStorageMetadata):
            fitted.wanted[fqn] = ObjectEntry()
        elif isinstance(entry, ObjectEntry):
            shape, dtype = tuple(saved.size), saved.properties.dtype
            fitted.wanted[fqn] = TensorEntry(ShardReport(global_shape=shape, local_sizes=shape), dtype, False)
            fitted.numbers[fqn] = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            fitted.wanted[fqn] = entry
        if saved_name != fqn:
            fitted.saved_names[fqn] = saved_name
    fitted.problems.extend(problem for problem in table.problems if fitted.not_read.get(problem.fqn) != "left")
    return fitted


def places_of(flat: FlatStateDict, targets: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """The place of each target in the nested state dict; lacks targets whose place is unknown.

    A subclass may have changed the targets of ``flat`` (keys renamed, left out or added) and its stock paths.
    """
    if targets.keys() == flat.paths.keys() and paths == flat.stock_paths:
        return flat.paths
    path_of = {id(value): flat.paths[fqn] for fqn, value in flat.values.items() if isinstance(value, torch.Tensor)}
    places = {}
    for fqn, target in targets.items():
        if fqn in flat.paths and paths.get(fqn, flat.stock_paths[fqn]) == flat.stock_paths[fqn]:
            places[fqn] = flat.paths[fqn]
        elif fqn in paths:
            places[fqn] = paths[fqn]
        elif id(target) in path_of:
            places[fqn] = path_of[id(target)]
    return places


SavedEntry = TensorStorageMetadata | BytesStorageMetadata


def _find_misfit(fqn: str, target: Any, entry: KeyEntry, saved: SavedEntry, cast: CastPolicy) -> Problem | None:
    """Why a saved value cannot become a target, by its metadata; ``None`` where it can."""
    is_object = isinstance(entry, ObjectEntry)
    if is_object != isinstance(saved, BytesStorageMetadata):
        if _is_one_number(target, saved):
            return None
        kinds = ("a tensor", "a non-tensor value")
        return Problem(
            "wrong_type",
            fqn,
            f"the checkpoint has {kinds[not is_object]}, the target is {kinds[is_object]}; "
            "put a target of the saved kind there, or leave the key out",
        )
    if isinstance(entry, ObjectEntry) or isinstance(saved, BytesStorageMetadata):
        if not holds_shards(target):
            return None
        detail = "the checkpoint has it as one value, of one rank; the target holds DTensors or other shards"
        return Problem("wrong_type", fqn, f"{detail}: load plain tensors there")
    if tuple(saved.size) != tuple(entry.global_shape):
        return Problem(
            "wrong_shape",
            fqn,
            f"Size mismatch between saved {saved.size} and current: {torch.Size(entry.global_shape)} for {fqn}; "
            "build the model with the saved size, or leave the key out",
        )
    if lies_in_local(entry) and may_overlap_itself(target):
        detail = "cannot be filled: several elements of the target share memory; load into a clone() of it"
        return Problem("unsupported_tensor", fqn, detail)
    if isinstance(entry, TensorEntry) and target.is_meta and holds_wrapper(target):
        reason = why_not_materialized(local_tensor(target))
        if reason is not None:
            return Problem("unsupported_tensor", fqn, reason)
    return cast_problem(fqn, saved.properties.dtype, entry.dtype, cast)


def _is_one_number(target: Any, saved: SavedEntry) -> bool:
    """Whether the load may read a number from a tensor without dims, or into one; the read value decides then."""
    if isinstance(saved, TensorStorageMetadata):
        return type(target) in (bool, int, float) and len(saved.size) == 0
    whole = not isinstance(target, DTensor) or all(placement.is_replicate() for placement in target.placements)
    return isinstance(target, torch.Tensor) and not describes_itself(target) and whole and target.dim() == 0


def number_for(value: Any, dtype: torch.dtype, policy: CastPolicy) -> int | float | complex:
    """The number to fill a tensor without dims with, where the checkpoint has a number in its place.

    A float has no dtype of its own: in float32 and float64 it becomes ``torch.tensor(value, dtype=dtype)``. Integers,
    and floats in narrower dtypes, must be kept exactly.

    Raises:
        ValueError: The value is no number, or the tensor would hold another one.
    """
    if not isinstance(value, (bool, int, float, complex)):
        raise ValueError(
            f"it is a {type(value).__name__}, the target is a tensor; put a target of the saved kind there"
        )
    kind = next(kind for kind, numbers in enumerate((bool, int, float, complex)) if isinstance(value, numbers))
    if kind == kind_of_number(dtype) or (kind < kind_of_number(dtype) and policy != "forbid"):
        kept = _in_dtype(value, dtype)
        is_rounded_well = kind == 2 and (dtype in FLOATS or policy == "allow") and not math.isinf(abs(kept))
        if kept == value or value != value or is_rounded_well:
            return kept
    raise ValueError(f"it is {value!r}, the target is a tensor of {dtype}, which cannot hold that number")


def _in_dtype(value: complex, dtype: torch.dtype) -> int | float | complex:
    """The number that a tensor of this dtype holds for a value; infinity where the value is out of range."""
    try:
        number: int | float | complex = torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError):
        return math.inf
    return number


def number_from(tensor: torch.Tensor, kind: type) -> int | float | bool:
    """The number of class ``kind`` in a tensor without dims.

    Raises:
        ValueError: There is no such number.
    """
    value = tensor.item()
    if isinstance(value, bool) == (kind is bool) and not isinstance(value, complex):
        if kind is float or math.isfinite(value):
            number = kind(value)
            if number == value or value != value:
                return number
    raise ValueError(f"it is a tensor with {value!r}, the target is a {kind.__name__}, which cannot be that number")
