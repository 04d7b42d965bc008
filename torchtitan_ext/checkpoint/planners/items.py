"""The items of plans: what one rank writes, by the coordinator's decision, and which parts of saved chunks it reads.

Items are made from columns in C++, since thousands of calls of their constructors cost more than all else of a plan.
Whether the boxes of a plan can be cut out of wrapper subclasses is asked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.saved_chunks import ChunkList, Part, is_covered
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.key_table import (
    Box,
    BoxesEntry,
    EncodedTable,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
)
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import Chunk, Steps, candidate_steps, num_elements, shard_of
from torchtitan_ext.layout.wrapper import why_not_cut


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
        places: Section and position of each key in the rank's table.
        chunks: What is written of each key, with the chunk's place in the metadata's list; none for objects.
    """

    entry: KeyEntry
    fqns: Sequence[str]
    places: Sequence[tuple[int, int]]
    chunks: Sequence[tuple[int, Chunk]]


def read_writes(decision: bytes, table: KeyTable, encoded: EncodedTable) -> Iterator[ClassWrites]:
    """What a decision of the coordinator (``csrc/core/write_plan.h``) means for the rank that sent this table."""
    for writes in _core.read_decision(decision, encoded.kind_of):
        fqns = [encoded.names[writes.section][key] for key in writes.keys]
        entry = table.entries[fqns[0]]
        chunks = _chunks(entry, writes.steps, writes.first_chunk, writes.boxes)
        yield ClassWrites(entry, fqns, [(writes.section, key) for key in writes.keys], chunks)


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


@dataclass(frozen=True)
class ReadDecision:
    """What the coordinator tells one rank.

    Attributes:
        steps: Sharding orders that are not the first of the rank's ``candidate_steps``.
        is_cover_checked: Whether the coordinator's metadata is the rank's own, so that its check of the cover holds.
        report: What the load does, where a policy asked for it.
    """

    steps: Mapping[str, Steps]
    is_cover_checked: bool
    report: LoadReport | None


def wanted_chunks(entry: TensorEntry | BoxesEntry, steps: Steps | None) -> Sequence[Chunk]:
    """The chunks that a rank fills, sharded by these steps; see ``shard_of``."""
    if isinstance(entry, TensorEntry):
        return shard_of(entry.report, steps).chunks
    if entry.local_offsets is not None:
        return [Chunk(*box, begin) for box, begin in zip(entry.boxes, entry.local_offsets, strict=True)]
    # Each box is a tensor of its own: its elements begin at 0.
    return [Chunk(offsets, sizes, (0,) * len(offsets)) for offsets, sizes in entry.boxes]


def read_items(
    table: KeyTable,
    encoded: EncodedTable,
    saved_names: Mapping[str, str],
    chunks_of: Callable[[str], ChunkList],
    decided: Mapping[str, Steps],
) -> list[ReadItem]:
    """What one rank reads: values that are no tensors, then tensors, both in the order of keys.

    Args:
        table: Its entries.
        encoded: Their order.
        saved_names: What keys are called in the checkpoint, where that differs.
        chunks_of: What is saved of a key.
        decided: Sharding orders that are not the first of the rank's ``candidate_steps``.
    """
    zero = torch.Size((0,))
    items: list[ReadItem] = []
    parts: list[tuple[str, str, Part]] = []
    found: dict[object, list[Part]] = {}
    for section, (fqns, kinds) in enumerate(zip(encoded.names, encoded.kind_of, strict=True)):
        for fqn, kind in zip(fqns, kinds, strict=True):
            entry, saved_name = table.entries[fqn], saved_names.get(fqn, fqn)
            if isinstance(entry, ObjectEntry):
                items.append(
                    ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), zero, MetadataIndex(saved_name), zero, zero)
                )
                continue
            chunk_list, steps = chunks_of(fqn), decided.get(fqn)
            # Keys of one kind and order that are saved alike are read alike; boxes may differ from key to key.
            alike = (section, kind, steps, chunk_list, fqn if isinstance(entry, BoxesEntry) else "")
            if alike not in found:
                found[alike] = chunk_list.find_parts(wanted_chunks(entry, steps))
            parts += [(fqn, saved_name, part) for part in found[alike]]
    return items + tensor_items(parts)


def tensor_items(parts: Sequence[tuple[str, str, Part]]) -> list[ReadItem]:
    """What reads these parts of tensors, each with the tensor's name and its name in the checkpoint."""
    if not parts:
        return []
    fqns, saved_names, places = zip(*parts, strict=True)
    offsets, positions, local_offsets, chunk_offsets, chunks, saved_offsets, sizes = zip(*places, strict=True)
    return items_of(
        ReadItem,
        type=[LoadItemType.TENSOR] * len(parts),
        dest_index=items_of(MetadataIndex, fqn=fqns, offset=offsets, index=positions),
        dest_offsets=local_offsets,
        storage_index=items_of(MetadataIndex, fqn=saved_names, offset=chunk_offsets, index=chunks),
        storage_offsets=saved_offsets,
        lengths=sizes,
    )


def in_file_order(items: list[ReadItem], metadata: Metadata) -> list[ReadItem]:
    """As they lie in the files, where the metadata says: readers then go forward."""
    places = metadata.storage_data
    if not isinstance(places, Mapping):
        return items

    def place(item: ReadItem) -> tuple[str, int]:
        info = places.get(item.storage_index)
        return str(getattr(info, "relative_path", "")), int(getattr(info, "offset", 0))

    return sorted(items, key=place)


def unread_problems(table: KeyTable, items: Sequence[ReadItem]) -> list[Problem]:
    """Says where the items do not fill, once, what this rank holds."""
    by_key: dict[str, list[ReadItem]] = {}
    for item in items:
        by_key.setdefault(item.dest_index.fqn, []).append(item)
    problems = []
    for fqn, entry in table.entries.items():
        if isinstance(entry, ObjectEntry):
            continue
        reads = by_key.get(fqn, [])
        if isinstance(entry, TensorEntry):
            filled: list[Box] = [(item.dest_offsets, item.lengths) for item in reads]
            parts = [(entry.report.local_sizes, filled)]
        else:
            parts = [
                (chunk.sizes, [_in_box(item, chunk) for item in reads if item.dest_index.offset == chunk.offsets])
                for chunk in wanted_chunks(entry, None)
            ]
        if not all(is_covered(sizes, boxes) for sizes, boxes in parts):
            held = sum(num_elements(sizes) for sizes, _ in parts)
            found = sum(num_elements(item.lengths) for item in reads)
            detail = f"this rank holds {held} elements, the metadata that it saved for itself has {found} of them"
            problems.append(Problem("broken_checkpoint", fqn, f"{detail}; load on the mesh of the save"))
    return problems


def _in_box(item: ReadItem, chunk: Chunk) -> Box:
    """What an item fills, counted from the beginning of its box."""
    return tuple(a - b for a, b in zip(item.dest_offsets, chunk.local_offsets, strict=True)), item.lengths


def items_of(cls: type, **columns: Sequence[Any]) -> list[Any]:
    """An instance of a frozen dataclass of DCP per row of the columns, which have equal lengths.

    Args:
        columns: By field, all of them, with what the constructor would store.
    """
    if {field.name for field in fields(cls)} == columns.keys() and not hasattr(cls, "__post_init__"):
        return _core.instances(cls, **columns)
    # Of a torch that has other fields: its constructor knows what to do with them.
    return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def cut_problems(
    values: Mapping[str, Any], table: KeyTable, chunks_of: Callable[[str], ChunkList] | None = None
) -> list[Problem]:
    """Wrappers whose boxes cannot be cut in any order of sharding that this rank's local sizes leave open.

    Args:
        values: The flat state dict.
        chunks_of: What is saved of a key, for a load, which fills boxes; a save reads those of this rank's chunks.
    """
    problems = []
    for fqn in table.wrappers:
        entry = table.entries.get(fqn)
        if not isinstance(entry, TensorEntry):
            continue
        reasons = []
        for steps in candidate_steps(entry.report):
            shard = shard_of(entry.report, steps)
            if entry.report.mesh is not None and shard.sizes != entry.report.local_sizes:
                continue
            if chunks_of is None:
                boxes: list[Box] = [(chunk.local_offsets, chunk.sizes) for chunk in shard.chunks]
            else:
                boxes = [(part[2], part[6]) for part in chunks_of(fqn).find_parts(shard.chunks)]
            reasons.append(why_not_cut(local_tensor(values[fqn]), boxes, is_written=chunks_of is not None))
        refused = [reason for reason in reasons if reason is not None]
        if refused and len(refused) == len(reasons):
            problems.append(Problem("unsupported_tensor", fqn, refused[0]))
    return problems
