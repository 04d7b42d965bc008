"""What the names of mesh axes say: along which of them ranks get different data."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MODEL_AXES = frozenset({"tp", "pp", "cp", "ep", "etp", "sp"})


def replicates(axis: str) -> bool:
    """Whether an axis of this name replicates parameters."""
    return "replicate" in axis


def is_fsdp(axis: str) -> bool:
    """Whether an axis of this name shards parameters as FSDP2 does."""
    return not replicates(axis) and (axis.startswith("dp") or "fsdp" in axis)


def is_data_parallel(axis: str) -> bool:
    """Whether ranks along an axis of this name get different data: the axis replicates, or shards as FSDP2 does."""
    return replicates(axis) or is_fsdp(axis)


def is_model_parallel(axis: str) -> bool:
    """Whether ranks along an axis of this name are known to get the same samples: tensor, pipeline, context, expert."""
    return axis in _MODEL_AXES


def num_data_parallel(mesh: Mapping[str, int], num_ranks: int) -> int | None:
    """How many ranks get different data, by the sizes of named axes.

    Returns:
        ``None`` where the axes do not tell: there are none, one has another name, or they are not those of one mesh
        over all ranks.
    """
    is_told = all(is_data_parallel(axis) or is_model_parallel(axis) for axis in mesh)
    if not mesh or not is_told or math.prod(mesh.values()) != num_ranks:
        return None
    return math.prod(size for axis, size in mesh.items() if is_data_parallel(axis))
