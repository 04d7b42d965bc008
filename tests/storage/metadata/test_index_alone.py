"""Checkpoints of version 0.2 without `.metadata`: the index says all that it would, to every planner."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import without_metadata
from states import blank, differences, load, mixed_state, save

import torchtitan_ext as tte
from torchtitan_ext.errors import DamagedCheckpointError, StateRefusedError
from torchtitan_ext.storage import FileReader, FileWriter

INDEX = ".tte_index"


@pytest.mark.parametrize("load_planner", [tte.LoadPlanner, dcp.DefaultLoadPlanner])
@pytest.mark.parametrize("save_planner", [tte.SavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.parametrize("verify", ["auto", "all", "none"])
def test_round_trip(tmp_path: Path, verify: Any, save_planner: Any, load_planner: Any) -> None:
    state = mixed_state() | {"nested": {"list": [torch.ones(3), 4], "name": "x"}}
    save(state, FileWriter(tmp_path, sync=False), save_planner())
    without_metadata(tmp_path)
    assert not (tmp_path / ".metadata").exists()
    targets = blank(state) | {"nested": {"list": [torch.zeros(3), 0], "name": ""}}
    loaded = load(targets, FileReader(tmp_path, verify), load_planner())
    assert differences(loaded, {key: value for key, value in state.items() if key != "nested"}) == []
    assert loaded["nested"]["name"] == "x" and loaded["nested"]["list"][1] == 4
    assert torch.equal(loaded["nested"]["list"][0], torch.ones(3))


def test_it_says_the_same_as_metadata(tmp_path: Path) -> None:
    save(mixed_state(), FileWriter(tmp_path / "with", sync=False), tte.SavePlanner())
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    without_metadata(tmp_path / "without")
    one, other = (FileReader(tmp_path / name).read_metadata() for name in ("with", "without"))
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.planner_data == other.planner_data and one.version == other.version
    assert one.storage_data == other.storage_data
    assert list(one.storage_data) == list(other.storage_data)
    assert [place.index for place in one.storage_data] == [place.index for place in other.storage_data]


def test_a_save_takes_its_place(tmp_path: Path) -> None:
    for step in range(3):
        state = {"w": torch.full((3,), float(step))}
        with pytest.warns(UserWarning) if step else pytest.warns(UserWarning, match="single process"):
            save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
        assert differences(load({"w": torch.zeros(3)}, FileReader(tmp_path, "all"), tte.LoadPlanner()), state) == []
        without_metadata(tmp_path)
    with pytest.raises(BaseException, match="pass overwrite=True"):
        save(state, FileWriter(tmp_path, overwrite=False), tte.SavePlanner())


def test_stock_saving_over_it_makes_it_stale(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    without_metadata(tmp_path)
    state = {"w": torch.zeros(3), "b": torch.ones(2)}
    save(state, dcp.FileSystemWriter(tmp_path), tte.SavePlanner())
    with pytest.warns(UserWarning, match="saved over by stock"):
        loaded = load(blank(state), FileReader(tmp_path), tte.LoadPlanner())
    assert differences(loaded, state) == []


def test_without_either_the_error_names_metadata(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    (tmp_path / ".metadata").unlink()  # this index has no tables
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        FileReader(tmp_path).read_metadata()
    with pytest.raises(StateRefusedError, match=r"has no \.metadata that can be read"):
        tte.load({"w": torch.zeros(3)}, tmp_path, no_dist=True)


def test_every_flipped_bit_of_the_index_is_found(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 8), "step": 3}
    save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    without_metadata(tmp_path)
    content = (tmp_path / INDEX).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        (tmp_path / INDEX).write_bytes(damaged)
        for verify in ("all", "none"):
            with pytest.raises(DamagedCheckpointError, match="there is no .metadata to read without it"):
                FileReader(tmp_path, verify).read_metadata()  # type: ignore[arg-type]
