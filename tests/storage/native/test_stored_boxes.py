"""Boxes of strided tensors as parts that files are read by."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from torchtitan_ext.storage import FileReader


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
