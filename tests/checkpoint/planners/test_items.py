"""The items of plans, which are made by columns, are those that DCP's classes make of the same values."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import items_of, read_items, write_items
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    encode_table,
)
from torchtitan_ext.layout.layout import MeshLayout, ShardReport


def check_same(item: Any, expected: Any) -> None:
    assert item == expected and hash(item) == hash(expected)
    assert vars(item) == vars(expected)
    assert pickle.loads(pickle.dumps(item)) == expected


def reads_of(entries: dict[str, KeyEntry], saved_names: dict[str, str], boxes: list[ChunkStorageMetadata]) -> Any:
    names = encode_table(KeyTable(entries)).names
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size(()), boxes)
    saved = _core.SavedChunks({saved_names.get(fqn, fqn): tensor for fqn in entries}, TensorStorageMetadata)
    return _core.find_reads(names, entries, saved_names, saved, {})


def size(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


def test_read_items_are_those_of_the_class() -> None:
    mesh = MeshLayout((2,), (0, 1), None)
    entry = TensorEntry(ShardReport((9, 7), mesh, (1,), ((0, 1),), (4, 7)), torch.float32, False)
    saved = [ChunkStorageMetadata(size(begin, 0), size(length, 7)) for begin, length in ((0, 3), (3, 3), (6, 3))]
    reads = reads_of({"w": entry, "object": ObjectEntry(), "v": entry}, {"w": "old.w", "object": "other"}, saved)
    items = read_items(reads)
    check_same(
        items[0],
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex("object"), size(0), MetadataIndex("other"), size(0), size(0)),
    )
    parts = [(1, size(0, 0), size(2, 0), size(1, 7)), (2, size(1, 0), size(0, 0), size(3, 7))]
    wanted = [(fqn, saved_name, part) for fqn, saved_name in (("w", "old.w"), ("v", "v")) for part in parts]
    for item, (fqn, saved_name, (chunk, local_offsets, saved_offsets, lengths)) in zip(items[1:], wanted, strict=True):
        check_same(
            item,
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, size(5, 0), 0),
                dest_offsets=local_offsets,
                storage_index=MetadataIndex(saved_name, saved[chunk].offsets, chunk),
                storage_offsets=saved_offsets,
                lengths=lengths,
            ),
        )
        check_same(item.storage_index, MetadataIndex(saved_name, saved[chunk].offsets, chunk))
    assert reads.unfilled() == []
    assert read_items(reads_of({}, {}, [])) == []


def test_what_saved_chunks_do_not_fill_is_counted() -> None:
    box = BoxesEntry((9,), torch.float32, (((0,), (2,)), ((4,), (3,))))
    whole = TensorEntry(ShardReport((9,), local_sizes=(9,)), torch.float32, False)
    saved = [ChunkStorageMetadata(size(begin), size(length)) for begin, length in ((0, 3), (3, 3))]
    unfilled = reads_of({"w": whole, "b": box}, {}, saved).unfilled()
    assert [(one.fqn, one.num_wanted, one.num_read) for one in unfilled] == [("b", 5, 4), ("w", 9, 6)]
    overlapping = reads_of({"b": box}, {}, [*saved, *saved, ChunkStorageMetadata(size(6), size(3))]).unfilled()
    assert [(one.fqn, one.num_wanted, one.num_read) for one in overlapping] == [("b", 5, 9)]


def test_write_items_are_those_of_the_class_values_first_and_then_in_the_order_of_keys() -> None:
    entry = BoxesEntry((8,), torch.float32, (((0,), (3,)), ((3,), (5,))), local_offsets=((0,), (3,)))
    entries: dict[str, KeyEntry] = {"c": entry, "b": ObjectEntry(), "a": entry}
    writes = _core.held_writes(encode_table(KeyTable(entries)).names, entries)
    items = write_items(writes)
    assert [item.index.fqn for item in items] == ["b", "c", "c", "a", "a"]
    check_same(items[0], WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO))
    for item, (position, (offsets, sizes)) in zip(items[3:5], enumerate(entry.boxes), strict=True):
        index = MetadataIndex("a", torch.Size(offsets), position)
        check_same(item.index, index)
        assert item.tensor_data is not None and item.tensor_data.chunk.sizes == torch.Size(sizes)
        assert item.tensor_data.size == torch.Size((8,))
        expected = WriteItem(index, WriteItemType.SHARD, tensor_data=item.tensor_data)
        assert item == expected and vars(item) == vars(expected)
    assert writes.local_boxes() == {(fqn, box[0]): box for fqn in ("c", "a") for box in entry.boxes}
    assert write_items(_core.held_writes(([], [], []), {})) == []


def test_columns_have_one_length() -> None:
    with pytest.raises(ValueError, match="index: column has 2 rows, expected 1"):
        _core.instances(MetadataIndex, fqn=["a"], offset=[None], index=[1, 2])
    assert _core.instances(MetadataIndex, fqn=[], offset=[], index=[]) == []


def test_a_class_with_another_field_is_made_by_its_constructor() -> None:
    """As a later torch may have it."""

    @dataclass(frozen=True)
    class Later(MetadataIndex):
        replica: int = 7

        def __init__(self, fqn: str, offset: Any = None, index: Any = None) -> None:
            super().__init__(fqn, offset, index)
            object.__setattr__(self, "replica", 8)

    (later,) = items_of(Later, fqn=["a"], offset=[torch.Size((1,))], index=[2])
    assert vars(later) == vars(Later("a", torch.Size((1,)), 2)) and later.replica == 8
    assert items_of(Later, fqn=[], offset=[], index=[]) == []


def test_a_class_that_looks_at_its_values_is_made_by_its_constructor() -> None:
    @dataclass(frozen=True)
    class Doubled:
        value: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "value", 2 * self.value)

    assert items_of(Doubled, value=[1, 2]) == [Doubled(1), Doubled(2)]
