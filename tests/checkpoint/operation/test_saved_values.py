"""What a checkpoint has below a key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.component_plans import paths_below, read_saved

STATE: dict[str, Any] = {
    "loader": {"rank.0": {"next": 3, "seen": torch.tensor([1, 2])}, "list": [1, {"x": torch.ones(1)}]},
    "loader_2": {"next": 9},
    "step": 7,
}


@pytest.fixture
def reader(tmp_path: Path) -> FileSystemReader:
    tte.save(STATE, tmp_path)
    return FileSystemReader(tmp_path)


def test_values_come_back_nested_as_they_were(reader: FileSystemReader) -> None:
    saved = read_saved(reader, reader.read_metadata(), "loader", weights_only=True)
    assert saved["rank.0"]["next"] == 3 and torch.equal(saved["rank.0"]["seen"], torch.tensor([1, 2]))
    assert saved["list"][0] == 1 and torch.equal(saved["list"][1]["x"], torch.ones(1))
    assert set(saved) == {"rank.0", "list"}


def test_a_key_may_be_a_value_itself_or_nothing(reader: FileSystemReader) -> None:
    metadata = reader.read_metadata()
    assert read_saved(reader, metadata, "step", weights_only=True) == 7
    assert read_saved(reader, metadata, "absent", weights_only=True) == {}


def test_names_that_only_begin_alike_are_not_below(reader: FileSystemReader) -> None:
    metadata = reader.read_metadata()
    assert all(fqn.startswith("loader.") for fqn in paths_below("loader", metadata))
    assert paths_below("loader.rank", metadata) == {}, "rank.0 is one key with a dot in it"
    assert set(paths_below("loader.rank.0", metadata)) == {"loader.rank.0.next", "loader.rank.0.seen"}


def test_metadata_without_paths_is_cut_at_dots() -> None:
    metadata = Metadata({"a.b.c": None, "a.d": None})  # type: ignore[dict-item]
    assert paths_below("a", metadata) == {"a.b.c": ("b", "c"), "a.d": ("d",)}
