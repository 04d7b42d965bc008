"""The items of a load plan: which parts of which saved chunks go where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchtitan_ext.checkpoint.item_columns import items_of
from torchtitan_ext.checkpoint.key_table import Box, BoxesEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.rank_table import EncodedTable
from torchtitan_ext.checkpoint.report import LoadReport
from torchtitan_ext.checkpoint.saved_chunks import ChunkList, Part, is_covered
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import Chunk, Steps, num_elements, shard_of


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
    items: list[ReadItem] = []
    parts: list[tuple[str, str, Part]] = []
    found: dict[object, list[Part]] = {}
    for section, (fqns, kinds) in enumerate(zip(encoded.names, encoded.kind_of, strict=True)):
        for fqn, kind in zip(fqns, kinds, strict=True):
            entry, saved_name = table.entries[fqn], saved_names.get(fqn, fqn)
            if isinstance(entry, ObjectEntry):
                items.append(object_item(fqn, saved_name))
                continue
            chunk_list, steps = chunks_of(fqn), decided.get(fqn)
            # Keys of one kind and order that are saved alike are read alike; boxes may differ from key to key.
            alike = (section, kind, steps, chunk_list, fqn if isinstance(entry, BoxesEntry) else "")
            if alike not in found:
                found[alike] = chunk_list.find_parts(wanted_chunks(entry, steps))
            parts += [(fqn, saved_name, part) for part in found[alike]]
    return items + tensor_items(parts)


def object_item(fqn: str, saved_name: str) -> ReadItem:
    """What reads a value that is no tensor."""
    zero = torch.Size((0,))
    saved_index = MetadataIndex(saved_name)
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), zero, saved_index, zero, zero)


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
    return [
        problem
        for fqn, entry in table.entries.items()
        if not isinstance(entry, ObjectEntry)
        for problem in _unread_problems(fqn, entry, by_key.get(fqn, []))
    ]


def _in_box(item: ReadItem, chunk: Chunk) -> Box:
    """What an item fills, counted from the beginning of its box."""
    begin = tuple(a - b for a, b in zip(item.dest_offsets, chunk.local_offsets, strict=True))
    return begin, tuple(item.lengths)


def _unread_problems(fqn: str, entry: TensorEntry | BoxesEntry, items: Sequence[ReadItem]) -> list[Problem]:
    if isinstance(entry, TensorEntry):
        filled: list[Box] = [(tuple(item.dest_offsets), tuple(item.lengths)) for item in items]
        parts = [(entry.report.local_sizes, filled)]
    else:
        parts = [
            (
                chunk.sizes,
                [_in_box(item, chunk) for item in items if item.dest_index.offset == torch.Size(chunk.offsets)],
            )
            for chunk in wanted_chunks(entry, None)
        ]
    if all(is_covered(sizes, boxes) for sizes, boxes in parts):
        return []
    held, found = sum(num_elements(sizes) for sizes, _ in parts), sum(num_elements(item.lengths) for item in items)
    detail = f"this rank holds {held} elements, the metadata that it saved for itself has {found} of them"
    return [Problem("broken_checkpoint", fqn, f"{detail}; load on the mesh of the save")]
