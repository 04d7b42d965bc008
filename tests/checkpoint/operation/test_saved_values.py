"""What a checkpoint has below a key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.component_plans import OpenSource, paths_below, read_saved
from torchtitan_ext.checkpoint.rules.policy import Source

STATE: dict[str, Any] = {
    "loader": {"rank.0": {"next": 3, "seen": torch.tensor([1, 2])}, "list": [1, {"x": torch.ones(1)}]},
    "loader_2": {"next": 9},
    "step": 7,
}


@pytest.fixture
def opened(tmp_path: Path) -> OpenSource:
    tte.save(STATE, tmp_path)
    reader = FileSystemReader(tmp_path)
    return OpenSource("saved", Source(), reader, reader.read_metadata())


def test_values_come_back_nested_as_they_were(opened: OpenSource) -> None:
    saved = read_saved(opened, "loader")
    assert saved["rank.0"]["next"] == 3 and torch.equal(saved["rank.0"]["seen"], torch.tensor([1, 2]))
    assert saved["list"][0] == 1 and torch.equal(saved["list"][1]["x"], torch.ones(1))
    assert set(saved) == {"rank.0", "list"}


def test_a_key_may_be_a_value_itself_or_nothing(opened: OpenSource) -> None:
    assert read_saved(opened, "step") == 7
    assert read_saved(opened, "absent") == {}


def test_names_that_only_begin_alike_are_not_below(opened: OpenSource) -> None:
    metadata = opened.metadata
    assert all(fqn.startswith("loader.") for fqn in paths_below("loader", metadata))
    assert paths_below("loader.rank", metadata) == {}, "rank.0 is one key with a dot in it"
    assert set(paths_below("loader.rank.0", metadata)) == {"loader.rank.0.next", "loader.rank.0.seen"}


def test_metadata_without_paths_is_cut_at_dots() -> None:
    metadata = Metadata({"a.b.c": None, "a.d": None})  # type: ignore[dict-item]
    assert paths_below("a", metadata) == {"a.b.c": ("b", "c"), "a.d": ("d",)}
