"""What a checkpoint has below a key, read by one rank on its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.state.nested import Path
from torchtitan_ext.storage.saved_metadata import recorded_path


def read_saved(
    reader: StorageReader,
    metadata: Metadata,
    prefix: str,
    *,
    weights_only: bool,
    allow_classes: Collection[Callable[..., Any]] = (),
) -> Any:
    """Everything below a key of a checkpoint, nested as it was saved, tensors whole and on the CPU. Not collective."""
    paths = paths_below(prefix, metadata)
    saved = {fqn: metadata.state_dict_metadata[fqn] for fqn in paths}
    values: dict[str, Any] = {
        fqn: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for fqn, entry in saved.items()
    }
    planner = LoadPlanner(flatten_state_dict=False, weights_only=weights_only, allow_classes=allow_classes)
    planner.set_up_planner(values, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    if prefix in saved:
        return values[prefix]
    return unflatten_state_dict(values, {fqn: ("", *path) for fqn, path in paths.items()}).get("", {})


def paths_below(prefix: str, metadata: Metadata) -> dict[str, Path]:
    """The saved keys that stand below a key, and where: a key may have dots in it."""
    below: dict[str, Path] = {}
    for fqn in metadata.state_dict_metadata:
        if fqn == prefix or fqn.startswith(f"{prefix}."):
            path = recorded_path(metadata.planner_data, fqn) or tuple(fqn.split("."))
            ends = itertools.accumulate((len(str(part)) for part in path), lambda end, length: end + 1 + length)
            depth = next((depth for depth, end in enumerate(ends, 1) if end == len(prefix)), None)
            if depth is not None:
                below[fqn] = path[depth:]
    return below
