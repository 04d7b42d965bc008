"""The items of a load plan: which parts of which saved chunks go where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchtitan_ext.checkpoint.item_columns import items_of
from torchtitan_ext.checkpoint.key_table import BoxesEntry, TensorEntry
from torchtitan_ext.checkpoint.saved_chunks import Part, is_covered
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import Chunk, Steps, num_elements, shard_of


def wanted_chunks(entry: TensorEntry | BoxesEntry, steps: Steps | None) -> Sequence[Chunk]:
    """The chunks that a rank fills, sharded by these steps; see ``shard_of``."""
    if isinstance(entry, TensorEntry):
        return shard_of(entry.report, steps).chunks
    # Each box is a tensor of its own: its elements begin at 0.
    return [Chunk(offsets, sizes, (0,) * len(offsets)) for offsets, sizes in entry.boxes]


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


def unread_problems(fqn: str, entry: TensorEntry | BoxesEntry, items: Sequence[ReadItem]) -> list[Problem]:
    """Says where the items do not fill, once, what this rank holds."""
    if isinstance(entry, TensorEntry):
        parts = [(entry.report.local_sizes, items)]
    else:
        parts = [
            (sizes, [item for item in items if item.dest_index.offset == torch.Size(offsets)])
            for offsets, sizes in entry.boxes
        ]
    if all(is_covered(sizes, [(i.dest_offsets, i.lengths) for i in members]) for sizes, members in parts):
        return []
    held, found = sum(num_elements(sizes) for sizes, _ in parts), sum(num_elements(item.lengths) for item in items)
    detail = f"this rank holds {held} elements, the metadata that it saved for itself has {found} of them"
    return [Problem("broken_checkpoint", fqn, f"{detail}; load on the mesh of the save")]
