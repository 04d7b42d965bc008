"""What one rank writes, worked out from the keys that it holds and what the coordinator told it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.item_columns import items_of
from torchtitan_ext.checkpoint.key_table import BoxesEntry, KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.rank_table import EncodedTable
from torchtitan_ext.layout.layout import Chunk, Steps, num_elements, shard_of


@dataclass(frozen=True)
class ClassWrites:
    """What a rank writes of keys that it holds alike.

    Attributes:
        entry: Of one of the keys.
        fqns: The keys.
        places: Section and position of each key in the rank's table.
        chunks: What is written of each key, with the chunk's place in the metadata's list; none for objects.
    """

    entry: KeyEntry
    fqns: Sequence[str]
    places: Sequence[tuple[int, int]]
    chunks: Sequence[tuple[int, Chunk]]


def read_writes(decision: bytes, table: KeyTable, encoded: EncodedTable) -> Iterator[ClassWrites]:
    """What a decision of the coordinator (``csrc/core/write_plan.h``) means for the rank that sent this table."""
    for section, steps, first, keys, boxes in _core.read_decision(decision, encoded.kind_of):
        fqns = [encoded.names[section][key] for key in keys]
        entry = table.entries[fqns[0]]
        if isinstance(entry, BoxesEntry):
            chunks = [(position, Chunk(offsets, sizes, (0,) * len(sizes))) for position, (offsets, sizes) in boxes]
        else:
            chunks = list(enumerate(written_chunks(entry, steps), start=first))
        yield ClassWrites(entry, fqns, [(section, key) for key in keys], chunks)


def written_chunks(entry: TensorEntry | ObjectEntry, steps: Steps) -> Sequence[Chunk]:
    """What a rank writes of a key that is its part, sharded by these steps; a tensor without elements is one chunk."""
    if isinstance(entry, ObjectEntry):
        return []
    shape = entry.report.global_shape
    if num_elements(shape) == 0:
        zeros = (0,) * len(shape)
        return [Chunk(zeros, shape, zeros)]
    return shard_of(entry.report, steps).chunks


def write_items(written: Sequence[ClassWrites]) -> list[WriteItem]:
    """The items, in the order of keys. Those of keys that are held alike share what describes the data."""
    rows: list[tuple[Any, ...]] = []
    for writes in written:
        parts = _parts(writes.entry, writes.chunks)
        rows += [(place, fqn, *part) for place, fqn in zip(writes.places, writes.fqns, strict=True) for part in parts]
    if not rows:
        return []
    rows.sort(key=itemgetter(0))
    _, fqns, types, offsets, indices, data = zip(*rows, strict=True)
    return items_of(
        WriteItem,
        index=items_of(MetadataIndex, fqn=fqns, offset=offsets, index=indices),
        type=types,
        bytes_io_data=[None] * len(rows),
        tensor_data=data,
    )


def _parts(
    entry: KeyEntry, chunks: Sequence[tuple[int, Chunk]]
) -> list[tuple[WriteItemType, torch.Size | None, int | None, TensorWriteData | None]]:
    """Type, offsets, position and data of the items of a key."""
    if isinstance(entry, ObjectEntry):
        return [(WriteItemType.BYTE_IO, None, None, None)]
    if isinstance(entry, BoxesEntry):
        item_type, shape, requires_grad = WriteItemType.SHARD, entry.global_shape, False
    else:
        is_plain = entry.report.mesh is None
        item_type = WriteItemType.TENSOR if is_plain else WriteItemType.SHARD
        shape, requires_grad = entry.report.global_shape, entry.requires_grad
    properties, size = TensorProperties(dtype=entry.dtype, requires_grad=requires_grad), torch.Size(shape)
    parts: list[tuple[WriteItemType, torch.Size | None, int | None, TensorWriteData | None]] = []
    for index, chunk in chunks:
        stored = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        parts.append((item_type, stored.offsets, index, TensorWriteData(stored, properties, size)))
    return parts
