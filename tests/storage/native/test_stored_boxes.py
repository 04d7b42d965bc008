"""Boxes of strided tensors as parts that files are read by."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from casts import FLOATS, without_nan
from fetched_reads import fetch
from states import bits, load, save
from tier import num_cases
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from torchtitan_ext import _core
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.raw_tensor import dtype_name


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
    with pytest.raises(CheckpointException, match=r"byte \d+: a tensor of 1 dims lies here, expected one of 2"):
        load({"w": torch.zeros(1, 3)}, OtherDims(tmp_path), dcp.DefaultLoadPlanner())


def test_boxes_of_any_strides_in_the_file_and_in_memory(tmp_path: Path) -> None:
    """Turned, repeated (stride 0), cut and cast, from one element to several blocks of the file."""
    drawn = random.Random(5)
    memory = torch.randint(256, (3 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    (tmp_path / "file").write_bytes(memory.numpy().tobytes())
    for _ in range(num_cases(300)):
        dtype = drawn.choice((torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128))
        wanted_dtype = drawn.choice(
            [dtype, *(one for one in FLOATS if _core.has_cast(dtype_name(dtype), dtype_name(one)))]
        )
        sizes = [drawn.choice((1, 2, 3, 7, 70, 300)) for _ in range(drawn.randrange(5))]
        while torch.Size(sizes).numel() * dtype.itemsize > 2 << 20:
            sizes[drawn.randrange(len(sizes))] = 2
        repeated = [drawn.random() < 0.2 for _ in sizes]
        order = drawn.sample(range(len(sizes)), len(sizes))
        strides, num_stored = [0] * len(sizes), 1
        for dim in order:
            if not repeated[dim]:
                strides[dim], num_stored = num_stored, num_stored * sizes[dim]
        begin = drawn.randrange(800)
        flat = memory[begin : begin + num_stored * dtype.itemsize].clone().view(dtype)
        offsets = [drawn.randrange(size) for size in sizes]
        box = [drawn.randint(0, size - offset) for size, offset in zip(sizes, offsets, strict=True)]
        wanted = flat.as_strided(sizes, strides)[tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))]
        turned = drawn.sample(range(len(box)), len(box))
        place = torch.zeros([box[dim] for dim in turned], dtype=wanted_dtype).permute(
            [turned.index(dim) for dim in range(len(box))]
        )
        runs = _core.RunReader()
        file = runs.add_file(str(tmp_path / "file"), -1)
        stored = _core.StoredTensor(dtype_name(dtype), sizes, strides, begin)
        runs.add_box(file, stored, offsets, place.shape, place.data_ptr(), place.stride(), dtype_name(wanted_dtype))
        if drawn.random() < 0.5:
            runs.read(2, "none")
        else:
            fetch(runs, [tmp_path / "file"], "none", drawn)
        if wanted_dtype != dtype:
            place, wanted = without_nan(place), without_nan(wanted.to(wanted_dtype))
        assert torch.equal(bits(place), bits(wanted)), (dtype, wanted_dtype, sizes, strides, box)
