"""The items of plans, which are made by columns, are those that DCP's classes make of the same values."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import ClassWrites, items_of, tensor_items, write_items
from torchtitan_ext.checkpoint.tables.key_table import ObjectEntry, TensorEntry
from torchtitan_ext.layout.layout import Chunk, ShardReport


def check_same(item: Any, expected: Any) -> None:
    assert item == expected and hash(item) == hash(expected)
    assert vars(item) == vars(expected)
    assert pickle.loads(pickle.dumps(item)) == expected


def test_read_items_are_those_of_the_class() -> None:
    def size(*sizes: int) -> torch.Size:
        return torch.Size(sizes)

    part = (size(4, 0), 1, size(0, 2), size(3, 0), 2, size(1, 0), size(2, 5))
    items = tensor_items([("w", "old.w", part), ("v", "v", part)])
    for item, (fqn, saved_name) in zip(items, [("w", "old.w"), ("v", "v")], strict=True):
        check_same(
            item,
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, size(4, 0), 1),
                dest_offsets=size(0, 2),
                storage_index=MetadataIndex(saved_name, size(3, 0), 2),
                storage_offsets=size(1, 0),
                lengths=size(2, 5),
            ),
        )
        check_same(item.storage_index, MetadataIndex(saved_name, size(3, 0), 2))
    assert tensor_items([]) == []


def test_write_items_are_those_of_the_class_in_the_order_of_keys() -> None:
    entry = TensorEntry(ShardReport(global_shape=(8,), local_sizes=(8,)), torch.float32, False)
    chunks = [(0, Chunk((0,), (3,), (0,))), (1, Chunk((3,), (5,), (3,)))]
    written = [
        ClassWrites(entry, ["a", "c"], [(0, 0), (0, 2)], chunks),
        ClassWrites(ObjectEntry(), ["b"], [(0, 1)], []),
    ]
    items = write_items(written)
    assert [item.index.fqn for item in items] == ["a", "a", "b", "c", "c"]
    check_same(items[2], WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO))
    for item, (position, chunk) in zip(items[3:], chunks, strict=True):
        index = MetadataIndex("c", torch.Size(chunk.offsets), position)
        check_same(item.index, index)
        assert item.tensor_data is not None and item.tensor_data.chunk.sizes == torch.Size(chunk.sizes)
        assert item.tensor_data.size == torch.Size((8,))
        expected = WriteItem(index, WriteItemType.TENSOR, tensor_data=item.tensor_data)
        assert item == expected and vars(item) == vars(expected)
    assert write_items([]) == []


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
