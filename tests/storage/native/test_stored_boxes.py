"""Boxes of strided tensors as parts that files are read by."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.native.read_batch import boxes_in_file_order


def test_windows_with_elements_in_common_are_cut_where_they_overlap() -> None:
    assert list(boxes_in_file_order((3, 4), (2, 1))) == [((0, 0), (3, 2)), ((0, 2), (3, 2))]
    assert list(boxes_in_file_order((4, 3), (1, 4))) == [((0, 0), (4, 3))]
    assert len(list(boxes_in_file_order((3, 1 << 40), (1, 1)))) == 3
    assert len(list(boxes_in_file_order((1 << 40, 3), (1, 2)))) == 3


def is_in_file_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """The smaller strides lead to less than one step of the next one."""
    steps = sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1)
    return all(
        sum(stride * (size - 1) for stride, size in steps[:number]) < steps[number][0] for number in range(len(steps))
    )


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


class OtherDims(FileReader):
    """Finds metadata that has a dim more than the records."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        metadata = super().read_metadata(*args, **kwargs)
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([1, 3])  # type: ignore[union-attr]
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3]))]  # type: ignore[union-attr]
        ((index, place),) = metadata.storage_data.items()
        metadata.storage_data = {type(index)("w", torch.Size([0, 0])): place}
        return metadata


def test_metadata_that_has_other_dims_than_a_record_is_damage(tmp_path: Path) -> None:
    save({"w": torch.arange(3.0)}, dcp.FileSystemWriter(tmp_path))
    with pytest.raises(CheckpointException, match=r"a tensor of sizes \[3\] lies at byte \d+ .*expected one of 2 dims"):
        load({"w": torch.zeros(1, 3)}, OtherDims(tmp_path), dcp.DefaultLoadPlanner())
