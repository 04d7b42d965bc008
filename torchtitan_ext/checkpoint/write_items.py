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
from torchtitan_ext.checkpoint.key_table import Box, BoxesEntry, KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.rank_table import EncodedTable
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import Chunk, Steps, num_elements, shard_of


@dataclass(frozen=True)
class WriteDecision:
    """What the coordinator tells one rank.

    Attributes:
        writes: The sharding order of each class of keys, and what the rank writes of it (``csrc/core/write_plan.h``).
        token: The name of this plan in the coordinator's cache.
        rank: The rank's position in this plan.
        several_boxes: The first keys of which some rank writes more than one box.
        known_tokens: All plans that the coordinator still knows: a rank must not refer to others.
    """

    writes: bytes
    token: str
    rank: int
    several_boxes: Sequence[str]
    known_tokens: frozenset[str] = frozenset()


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
        yield ClassWrites(entry, fqns, [(section, key) for key in keys], _chunks(entry, steps, first, boxes))


def held_writes(table: KeyTable, encoded: EncodedTable) -> Iterator[ClassWrites]:
    """All that a rank holds, as it would write it by its own reading of the layouts and without other ranks."""
    for section, fqns in enumerate(encoded.names):
        for position, fqn in enumerate(fqns):
            entry = table.entries.get(fqn)
            if entry is not None:
                boxes = list(enumerate(entry.boxes)) if isinstance(entry, BoxesEntry) else []
                yield ClassWrites(entry, [fqn], [(section, position)], _chunks(entry, None, 0, boxes))


def written_chunks(entry: TensorEntry | ObjectEntry, steps: Steps | None) -> Sequence[Chunk]:
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


def check_storage_takes(decision: WriteDecision, storage_data: Any) -> None:
    """Refuses several boxes of a key for a HuggingFaceStorageWriter, which marks its plans with these entries.

    A safetensors file has one tensor per key: that writer would keep a rank's last box and drop the others.
    """
    if not isinstance(storage_data, dict) or not {"shard_index", "fqn_to_index_mapping"} & storage_data.keys():
        return
    if decision.several_boxes:
        detail = (
            "a rank holds several boxes of it, and safetensors files keep one per key; save with FileSystemWriter, "
            "or redistribute it to plain Shard placements first"
        )
        raise refusal("save", [Problem("unsupported_tensor", fqn, detail) for fqn in decision.several_boxes])


def _chunks(
    entry: KeyEntry, steps: Steps | None, first: int, boxes: Sequence[tuple[int, Box]]
) -> list[tuple[int, Chunk]]:
    """What is written of a key, with the places in the metadata's list, which begin with ``first``.

    Args:
        boxes: Of a tensor that describes itself, with their places.
    """
    if isinstance(entry, BoxesEntry):
        local_offsets = dict(zip(entry.boxes, entry.local_offsets or (), strict=False))
        return [(position, Chunk(*box, local_offsets.get(box, (0,) * len(box[1])))) for position, box in boxes]
    return list(enumerate(written_chunks(entry, steps), start=first))


def _parts(
    entry: KeyEntry, chunks: Sequence[tuple[int, Chunk]]
) -> list[tuple[WriteItemType, torch.Size | None, int | None, TensorWriteData | None]]:
    """Type, offsets, position and data of the items of a key."""
    if isinstance(entry, ObjectEntry):
        return [(WriteItemType.BYTE_IO, None, None, None)]
    if isinstance(entry, BoxesEntry):
        item_type, shape = WriteItemType.SHARD, entry.global_shape
    else:
        is_plain = entry.report.mesh is None
        item_type, shape = WriteItemType.TENSOR if is_plain else WriteItemType.SHARD, entry.report.global_shape
    properties, size = TensorProperties(dtype=entry.dtype, requires_grad=entry.requires_grad), torch.Size(shape)
    parts: list[tuple[WriteItemType, torch.Size | None, int | None, TensorWriteData | None]] = []
    for index, chunk in chunks:
        stored = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        parts.append((item_type, stored.offsets, index, TensorWriteData(stored, properties, size)))
    return parts
