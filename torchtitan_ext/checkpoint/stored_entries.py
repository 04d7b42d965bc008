"""The metadata of a save, as DCP's objects, made of what all ranks agreed on."""

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

from torchtitan_ext.checkpoint.agreement import Agreement
from torchtitan_ext.checkpoint.rank_table import RankTable


def stored_entries(agreement: Agreement) -> dict[str, Any]:
    """What is stored of each key. Keys of a class share what describes them: pickle then writes it once."""
    shared: dict[int, tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None] = {}
    entries: dict[str, Any] = {}
    for key, of_class in agreement.numbers():
        if of_class not in shared:
            shared[of_class] = _shared_parts(agreement, of_class)
        parts = shared[of_class]
        entries[agreement.names[key]] = BytesStorageMetadata() if parts is None else TensorStorageMetadata(*parts)
    return entries


def stored_paths(agreement: Agreement, tables: Sequence[RankTable]) -> dict[str, tuple[Any, ...]]:
    """Where each key of any rank stands in the nested state dict."""
    paths = {fqn: path for table in reversed(tables) for fqn, path in table.odd_paths.items()}
    of_keys = zip(agreement.names, agreement.world.paths(), strict=True)
    return {**paths, **{fqn: path for fqn, path in of_keys if path is not None}}


def _shared_parts(
    agreement: Agreement, of_class: int
) -> tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None:
    kind = agreement.kind(of_class)
    if kind.dtype is None:
        return None
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in agreement.world.written_boxes(of_class)
    ]
    properties = TensorProperties(dtype=kind.dtype, requires_grad=kind.requires_grad)
    return properties, torch.Size(kind.global_shape), chunks
