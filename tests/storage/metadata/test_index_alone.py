"""`FileWriter(stock_metadata=False)`: the index says all that `.metadata` would, to every planner."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, load, mixed_state, save

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, DamagedCheckpointError, StateRefusedError
from torchtitan_ext.storage import FileReader, FileWriter

INDEX = ".tte_index"


@pytest.mark.parametrize("load_planner", [tte.LoadPlanner, dcp.DefaultLoadPlanner])
@pytest.mark.parametrize("save_planner", [tte.SavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.parametrize("verify", ["auto", "all", "none"])
def test_round_trip(tmp_path: Path, verify: Any, save_planner: Any, load_planner: Any) -> None:
    state = mixed_state() | {"nested": {"list": [torch.ones(3), 4], "name": "x"}}
    save(state, FileWriter(tmp_path, sync=False, stock_metadata=False), save_planner())
    assert not (tmp_path / ".metadata").exists()
    targets = blank(state) | {"nested": {"list": [torch.zeros(3), 0], "name": ""}}
    loaded = load(targets, FileReader(tmp_path, verify), load_planner())
    assert differences(loaded, {key: value for key, value in state.items() if key != "nested"}) == []
    assert loaded["nested"]["name"] == "x" and loaded["nested"]["list"][1] == 4
    assert torch.equal(loaded["nested"]["list"][0], torch.ones(3))


def test_it_says_the_same_as_metadata(tmp_path: Path) -> None:
    state = mixed_state()
    for name, stock_metadata in (("with", True), ("without", False)):
        save(state, FileWriter(tmp_path / name, sync=False, stock_metadata=stock_metadata), tte.SavePlanner())
    one, other = (FileReader(tmp_path / name).read_metadata() for name in ("with", "without"))
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.planner_data == other.planner_data and one.version == other.version
    assert one.storage_data == other.storage_data
    assert list(one.storage_data) == list(other.storage_data)
    assert [place.index for place in one.storage_data] == [place.index for place in other.storage_data]


def test_tte_save_and_load(tmp_path: Path) -> None:
    state = mixed_state()
    writer = FileWriter(tmp_path, sync=False, stock_metadata=False)
    result = tte.save(state, storage_writer=writer, no_dist=True)
    assert len(result.metadata.state_dict_metadata) == len(state) + 1  # "settings" has two entries
    targets = blank(state)
    tte.load(targets, tmp_path, no_dist=True)
    assert differences(targets, state) == []


def test_it_takes_the_place_of_an_older_checkpoint_and_back(tmp_path: Path) -> None:
    for step, stock_metadata in enumerate((True, False, True, False)):
        state = {"w": torch.full((3,), float(step))}
        with pytest.warns(UserWarning) if step else pytest.warns(UserWarning, match="single process"):
            save(state, FileWriter(tmp_path, sync=False, stock_metadata=stock_metadata), tte.SavePlanner())
        assert (tmp_path / ".metadata").exists() == stock_metadata
        assert differences(load({"w": torch.zeros(3)}, FileReader(tmp_path, "all"), tte.LoadPlanner()), state) == []
    with pytest.raises(BaseException, match="pass overwrite=True"):
        save(state, FileWriter(tmp_path, overwrite=False), tte.SavePlanner())


def test_stock_saving_over_it_makes_it_stale(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path, sync=False, stock_metadata=False), tte.SavePlanner())
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
    save(state, FileWriter(tmp_path, sync=False, stock_metadata=False), tte.SavePlanner())
    content = (tmp_path / INDEX).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        (tmp_path / INDEX).write_bytes(damaged)
        for verify in ("all", "none"):
            with pytest.raises(DamagedCheckpointError, match="there is no .metadata to read without it"):
                FileReader(tmp_path, verify).read_metadata()  # type: ignore[arg-type]


class PlannerWithClasses(tte.SavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["own"] = {1, 2}
        return plans, metadata


def test_planner_data_that_only_a_pickle_holds(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, sync=False, stock_metadata=False)
    with pytest.raises(CheckpointFailedError, match="save with stock_metadata=True"):
        tte.save({"w": torch.ones(3)}, storage_writer=writer, planner=PlannerWithClasses(), no_dist=True)
    with pytest.raises(FileNotFoundError):
        FileReader(tmp_path).read_metadata()
    tte.save({"w": torch.ones(3)}, storage_writer=FileWriter(tmp_path), planner=PlannerWithClasses(), no_dist=True)
    assert dcp.FileSystemReader(tmp_path).read_metadata().planner_data["own"] == {1, 2}


def test_a_moved_checkpoint(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path / "a", sync=False, stock_metadata=False), tte.SavePlanner())
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert load({"w": torch.zeros(3)}, FileReader(tmp_path / "b"), tte.LoadPlanner())["w"].sum() == 3


def test_what_dcp_save_returns(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, sync=False, stock_metadata=False)
    metadata = dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
    sent = pickle.dumps(metadata)
    assert len(sent) < 1000 and pickle.loads(sent) == metadata
