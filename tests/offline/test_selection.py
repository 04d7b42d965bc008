"""Which keys are chosen, what they are called, and where they stand in a nested state dict."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_as
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchtitan_ext as tte
from torchtitan_ext.offline.compare.diff import DiffReport, diff
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.metadata.saved_state import SavedState

STATE = {"model": {"layers": [{"w": torch.ones(2)}, {"w": torch.ones(3)}], "norm": torch.ones(4)}, "step": 7}


def nested(path: Path) -> dict[str, Any]:
    """What stock reads of a checkpoint, in its nested form."""
    dcp_to_torch_save(path, path / "whole.pt")
    state: dict[str, Any] = torch.load(path / "whole.pt")
    (path / "whole.pt").unlink()
    return state


def test_globs_match_the_names_that_keys_get(tmp_path: Path) -> None:
    source = open_source(save_as("ours", tmp_path / "a", STATE))
    chosen = Selection(("layers.1.*", "norm"), "model").keys_of(source)
    assert chosen == {"layers.1.w": "model.layers.1.w", "norm": "model.norm"}
    assert set(Selection(("model.layers.*",)).keys_of(source)) == {"model.layers.0.w", "model.layers.1.w"}
    with pytest.raises(
        ValueError, match=r"only: got 'model\.\*', which matches no key of .*a below model; there are lay"
    ):
        Selection(("norm", "model.*"), "model").check_finds(source)
    with pytest.raises(
        ValueError, match="prefix: got 'modle', below which there is no key of .*; perhaps 'model' is m"
    ):
        Selection((), "modle").check_finds(source)


def test_globs_choose_the_same_keys_of_a_checkpoint_without_the_prefix(tmp_path: Path) -> None:
    a = open_source(save_as("ours", tmp_path / "a", STATE))
    b = open_source(save_as("torch", tmp_path / "b", STATE["model"]))
    assert diff(a, b, selection=Selection(("layers.*",), "model")) == DiffReport((), 2)


def test_nesting_is_kept_below_a_prefix_and_with_gaps_in_lists(tmp_path: Path) -> None:
    source = open_source(save_as("ours", tmp_path / "a", STATE))
    convert(source, tmp_path / "b", to="dcp", selection=Selection(("layers.1*",), "model"), num_processes=1)
    assert FileReader(tmp_path / "b").read_metadata().planner_data["layers.1.w"] == ("layers", 1, "w")
    assert diff(source, open_source(tmp_path / "b"), selection=Selection(("layers.1*",), "model")) == DiffReport((), 1)


@pytest.mark.parametrize(
    "paths",
    [
        {"a.b": 5},
        {"a.b": None},
        {"a.b": ()},
        {"a.b": "a.b"},
        {"a.b": ["a", "b"]},
        {"a.b": {"a": "b"}},
        {"a.b": ("a",)},
        {"a.b": ("a", "b", "c")},
        {"a.b": ("a", b"b")},
        {"a.b": (("a",), "b")},
        {"a.b": ("a", True)},
        {"0": (0,)},
        {"a": ("a",), "a.b": ("a", "b")},
        {"a.b": ("a", "b"), "a": ("a",)},
        {"x.0": ("x", 0), "x.y": ("x", "y")},
        {"x.99999999999": ("x", 99_999_999_999)},
        {"x.-1": ("x", -1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["", "m"])
def test_odd_paths_of_metadata_are_not_followed(tmp_path: Path, paths: dict[str, Any], prefix: str) -> None:
    state = {f"m.{key}" if prefix else key: torch.full((2,), float(number)) for number, key in enumerate(paths)}
    source = open_source(save_as("ours", tmp_path / "a", state))
    planner_data = {
        f"m.{key}" if prefix else key: ("m", *path) if prefix and isinstance(path, tuple) else path
        for key, path in paths.items()
    }
    source.state = SavedState(source.state.entries, planner_data)
    selection = Selection(prefix=prefix)
    convert(source, tmp_path / "c", to="dcp", selection=selection, num_processes=1)
    loaded = nested(tmp_path / "c")
    for number, key in enumerate(paths):
        assert loaded.pop(key).tolist() == [number, number], loaded
    assert not loaded
    assert diff(source, open_source(tmp_path / "c"), selection=selection) == DiffReport((), len(paths))


@pytest.mark.parametrize("planner_data", [None, 3, [("a",)], {1: ("a", "b")}], ids=str)
def test_metadata_that_says_nothing_of_paths(tmp_path: Path, planner_data: Any) -> None:
    source = open_source(save_as("ours", tmp_path / "a", {"a": {"b": torch.ones(2)}}))
    source.state = SavedState(source.state.entries, planner_data)
    convert(source, tmp_path / "b", to="dcp", num_processes=1)
    assert nested(tmp_path / "b").keys() == {"a.b"}


@pytest.mark.parametrize(
    "state", [{"torchtitan_ext.world": torch.ones(3)}, {"torchtitan_ext": {"world": torch.ones(3)}}], ids=str
)
def test_a_key_with_the_name_of_the_record_of_the_world_is_a_key(tmp_path: Path, state: dict[str, Any]) -> None:
    tte.save(state, tmp_path / "a")
    assert FileReader(tmp_path / "a").read_metadata().planner_data == {"torchtitan_ext.world": tuple(state_path(state))}
    source = open_source(tmp_path / "a")
    reshard(source, tmp_path / "b", mesh={"dp": 3}, num_processes=1)
    assert diff(source, open_source(tmp_path / "b")) == DiffReport((), 1)
    convert(open_source(tmp_path / "b"), tmp_path / "c", to="dcp", num_processes=1)
    loaded = nested(tmp_path / "c")
    assert list(state_path(loaded)) == list(state_path(state))
    assert diff(source, open_source(tmp_path / "c")) == DiffReport((), 1)


def state_path(state: dict[str, Any]) -> list[str]:
    ((key, value),) = state.items()
    return [key, *(state_path(value) if isinstance(value, dict) else [])]
