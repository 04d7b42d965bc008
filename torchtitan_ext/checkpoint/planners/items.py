"""The items of plans: what one rank writes, by the coordinator's decision, and which parts of saved chunks it reads;
and the metadata of what all ranks write.

Items are made from columns in C++, since thousands of calls of their constructors cost more than all else of a plan.
Whether the boxes of a plan can be cut out of wrapper subclasses is asked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.agreement import Agreement, dtype_named
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, ObjectEntry, RankTable, TensorEntry
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import Box, Steps, candidate_steps, shard_of
from torchtitan_ext.layout.wrapper import why_not_cut
from torchtitan_ext.storage.metadata.lazy_metadata import Entry, columns_behind, lazy_entries


@dataclass(frozen=True)
class WriteDecision:
    """What the coordinator tells one rank.

    Attributes:
        writes: The sharding order of each class of keys, and what the rank writes of it (``csrc/core/write_plan.h``).
        several_boxes: The first keys of which some rank writes more than one box.
    """

    writes: bytes
    several_boxes: Sequence[str]


def write_items(writes: _core.Writes) -> list[WriteItem]:
    """The items, in the order of keys. Those of keys that are held alike share what describes the data."""
    described = [_described(part) for part in writes.parts]
    part_of = writes.part_of
    data = [described[number][1] for number in part_of]
    positions = [part.position for part in writes.parts]
    return items_of(
        WriteItem,
        index=items_of(
            MetadataIndex,
            fqn=writes.fqns,
            offset=[None if one is None else one.chunk.offsets for one in data],
            index=[positions[number] for number in part_of],
        ),
        type=[described[number][0] for number in part_of],
        bytes_io_data=[None] * len(data),
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


def _described(part: _core.WritePart) -> tuple[WriteItemType, TensorWriteData | None]:
    """The type of the item that writes a part, and what describes the data of a tensor."""
    entry = part.entry
    if isinstance(entry, ObjectEntry):
        return WriteItemType.BYTE_IO, None
    is_plain = isinstance(entry, TensorEntry) and entry.report.mesh is None
    stored = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
    properties = TensorProperties(dtype=entry.dtype, requires_grad=entry.requires_grad)
    data = TensorWriteData(stored, properties, torch.Size(entry.global_shape))
    return WriteItemType.TENSOR if is_plain else WriteItemType.SHARD, data


def metadata_entries(agreement: Agreement, plan: _core.WritePlan) -> dict[str, Entry]:
    """The metadata of each key, made when it is asked for. Keys of one class share chunks and properties, which pickle
    then writes once."""
    for kind in agreement.kinds:
        dtype_named(kind.dtype)  # raises where this torch has none of that name
    return lazy_entries(_core.planned_columns(agreement.joint, plan))


def metadata_paths(agreement: Agreement, tables: Sequence[RankTable]) -> dict[str, tuple[Any, ...]]:
    """The path of each key of any rank in the nested state dict."""
    paths = {fqn: path for table in reversed(tables) for fqn, path in table.rest.stock_paths.items()}
    return {**paths, **agreement.joint.paths()}


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


def read_items(reads: _core.Reads) -> list[ReadItem]:
    """The items of a list: values that are no tensors, then tensors, both in the order of keys."""
    zero = torch.Size((0,))
    values = [
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), zero, MetadataIndex(saved_name), zero, zero)
        for fqn, saved_name in reads.values.items()
    ]
    of = reads.columns(torch.Size)
    return values + items_of(
        ReadItem,
        type=[LoadItemType.TENSOR] * len(of["fqns"]),
        dest_index=items_of(MetadataIndex, fqn=of["fqns"], offset=of["offsets"], index=of["positions"]),
        dest_offsets=of["local_offsets"],
        storage_index=items_of(
            MetadataIndex, fqn=of["saved_names"], offset=of["chunk_offsets"], index=of["chunk_positions"]
        ),
        storage_offsets=of["saved_offsets"],
        lengths=of["sizes"],
    )


def in_file_order(items: Sequence[ReadItem], metadata: Metadata) -> list[ReadItem]:
    """As they lie in the files, where the metadata says: readers then go forward."""
    places = metadata.storage_data
    columns = columns_behind(places)
    if columns is not None:
        order = _core.ReadList(list(items), LoadItemType.BYTE_IO, columns).in_file_order()
        return [items[position] for position in order]
    if not isinstance(places, Mapping):
        return list(items)

    def place(item: ReadItem) -> tuple[str, int]:
        info = places.get(item.storage_index)
        return str(getattr(info, "relative_path", "")), int(getattr(info, "offset", 0))

    return sorted(items, key=place)


def unread_problems(table: KeyTable, reads: _core.Reads) -> list[Problem]:
    """Says where the parts do not fill, once, what this rank holds."""
    unfilled = {one.fqn: one for one in reads.unfilled()}
    return [
        Problem(
            "broken_checkpoint",
            fqn,
            f"this rank holds {unfilled[fqn].num_wanted} elements, the metadata that it saved for itself has "
            f"{unfilled[fqn].num_read} of them; load on the mesh of the save",
        )
        for fqn in table.entries
        if fqn in unfilled
    ]


def items_of(cls: type, **columns: Sequence[Any]) -> list[Any]:
    """An instance of a frozen dataclass of DCP per row of the columns, which have equal lengths.

    Args:
        columns: By field, all of them, with what the constructor would store.
    """
    if {field.name for field in fields(cls)} == columns.keys() and not hasattr(cls, "__post_init__"):
        return _core.instances(cls, **columns)
    # Of a torch that has other fields: its constructor knows what to do with them.
    return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def uncuttable_wrappers(
    values: Mapping[str, Any], table: KeyTable, chunks_of: Callable[[str], _core.ChunkIndex] | None = None
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
                boxes = [(part.local_offsets, part.sizes) for part in chunks_of(fqn).find_overlaps(shard.chunks)]
            reasons.append(why_not_cut(local_tensor(values[fqn]), boxes, is_written=chunks_of is not None))
        refused = [reason for reason in reasons if reason is not None]
        if refused and len(refused) == len(reasons):
            problems.append(Problem("unsupported_tensor", fqn, refused[0]))
    return problems
