"""Boxes of strided tensors as parts that files are read by."""

import random

import torch

from torchtitan_ext.storage.stock_records import boxes_in_file_order, is_in_file_order


def test_windows_with_elements_in_common_are_cut_where_they_overlap() -> None:
    assert list(boxes_in_file_order((3, 4), (2, 1))) == [((0, 0), (3, 2)), ((0, 2), (3, 2))]
    assert list(boxes_in_file_order((4, 3), (1, 4))) == [((0, 0), (4, 3))]
    assert len(list(boxes_in_file_order((3, 1 << 40), (1, 1)))) == 3
    assert len(list(boxes_in_file_order((1 << 40, 3), (1, 2)))) == 3


def test_boxes_are_in_file_order_and_hold_every_element_once() -> None:
    source = random.Random(0)
    for _ in range(500):
        sizes = tuple(source.randint(0, 5) for _ in range(source.randint(0, 4)))
        strides = tuple(source.randint(1, 30) for _ in sizes)
        seen = torch.zeros(sizes, dtype=torch.int64)
        for offsets, part in boxes_in_file_order(sizes, strides):
            assert is_in_file_order(part, strides), (sizes, strides, part)
            seen[tuple(slice(begin, begin + size) for begin, size in zip(offsets, part, strict=True))] += 1
        assert bool((seen == 1).all()), (sizes, strides)
