"""What was saved against the target that it is to become: kind, shape, dtype, memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchtitan_ext.checkpoint.cast import CastPolicy, cast_problem
from torchtitan_ext.checkpoint.key_table import BoxesEntry, KeyEntry, ObjectEntry, TensorEntry, lies_in_local
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import describes_itself, holds_wrapper, local_tensor, may_overlap_itself
from torchtitan_ext.layout.wrapper import why_not_materialized
from torchtitan_ext.state.nested import holds_shards

SavedEntry = TensorStorageMetadata | BytesStorageMetadata


def find_misfit(fqn: str, target: Any, entry: KeyEntry, saved: SavedEntry, cast: CastPolicy) -> Problem | None:
    """Why a saved value cannot become a target, from what the metadata says of it; ``None`` where it can.

    Args:
        target: What stands in the state dict.
        entry: How this rank describes it.
    """
    is_object = isinstance(entry, ObjectEntry)
    if is_object != isinstance(saved, BytesStorageMetadata):
        if is_one_number(target, saved):
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
    shape = entry.global_shape if isinstance(entry, BoxesEntry) else entry.report.global_shape
    if tuple(saved.size) != tuple(shape):
        return Problem(
            "wrong_shape",
            fqn,
            f"Size mismatch between saved {saved.size} and current: {torch.Size(shape)} for {fqn}; "
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


def is_one_number(target: Any, saved: SavedEntry) -> bool:
    """Whether a number may be read from a tensor without dims, or into one: what is saved shows when it is read."""
    if isinstance(saved, TensorStorageMetadata):
        return type(target) in (bool, int, float) and len(saved.size) == 0
    whole = not isinstance(target, DTensor) or all(placement.is_replicate() for placement in target.placements)
    return isinstance(target, torch.Tensor) and not describes_itself(target) and whole and target.dim() == 0
