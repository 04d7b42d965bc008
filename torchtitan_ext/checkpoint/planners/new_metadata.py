"""The metadata of a new checkpoint, by what all ranks agreed on, and the check that all of it was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_ext.checkpoint.tables.agreement import Agreement, dtype_named
from torchtitan_ext.checkpoint.tables.key_table import RankTable
from torchtitan_ext.errors import CheckpointFailedError


def metadata_entries(agreement: Agreement) -> dict[str, Any]:
    """The metadata of each key. Keys of one class share chunks and properties, which pickle then writes once."""
    shared: dict[int, tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None] = {}
    entries: dict[str, Any] = {}
    for key, of_class in agreement.agreed_keys.items():
        if of_class not in shared:
            shared[of_class] = _shared_parts(agreement, of_class)
        parts = shared[of_class]
        entries[agreement.names[key]] = BytesStorageMetadata() if parts is None else TensorStorageMetadata(*parts)
    return entries


def metadata_paths(agreement: Agreement, tables: Sequence[RankTable]) -> dict[str, tuple[Any, ...]]:
    """The path of each key of any rank in the nested state dict."""
    paths = {fqn: path for table in reversed(tables) for fqn, path in table.odd_paths.items()}
    of_keys = zip(agreement.names, agreement.world.paths(), strict=True)
    return {**paths, **{fqn: path for fqn, path in of_keys if path is not None}}


def _shared_parts(
    agreement: Agreement, of_class: int
) -> tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None:
    kind = agreement.kinds[of_class]
    dtype = dtype_named(kind.dtype)
    if dtype is None:
        return None
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in agreement.world.written_boxes(of_class)
    ]
    properties = TensorProperties(dtype=dtype, requires_grad=kind.requires_grad)
    return properties, torch.Size(kind.global_shape), chunks


def check_all_written(plan: SavePlan, results: Any, rank: int) -> None:
    """Raises CheckpointFailedError where storage reports an item of a plan not as written.

    Stock's writer loses errors of its threads. Only DCP's own form of results, a list of ``WriteResult``, is checked.
    """
    if not isinstance(results, list) or not all(isinstance(result, WriteResult) for result in results):
        return
    written = {result.index for result in results}
    lost = [item.index.fqn for item in plan.items if item.index not in written]
    if lost:
        names = ", ".join(dict.fromkeys(lost[:10]))
        text = f"{len(lost)} of {len(plan.items)} items were not written, without an error: {names}"
        raise CheckpointFailedError("save", {rank: text})
