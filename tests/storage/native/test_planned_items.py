"""Plans that are a list in C++ from the planner to the files: who asks for items gets them, and who changes them is
followed."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import differences
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners import load_planner, save_planner
from torchtitan_ext.checkpoint.planners.items import read_items, write_items
from torchtitan_ext.errors import WrongArgumentError
from torchtitan_ext.storage.metadata.lazy_metadata import columns_behind
from torchtitan_ext.storage.native.planned_items import (
    ListedReads,
    PlannedReads,
    PlannedWrites,
    reads_of,
    split_plan,
    writes_of,
)


def a_state() -> dict[str, Any]:
    return {
        "z": torch.arange(12.0).view(3, 4),
        "a": torch.arange(5, dtype=torch.int16),
        "half": torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex32),  # a record of torch.save
        "value": {"epoch": 3, "name": "x"},
    }


def zeros() -> dict[str, Any]:
    state = a_state()
    return {
        **{fqn: torch.zeros_like(one) for fqn, one in state.items() if fqn != "value"},
        "value": {"epoch": 0, "name": ""},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tte.save(a_state(), tmp_path, no_dist=True)
    return tmp_path


def plan_of(reader: tte.FileReader, planner: tte.LoadPlanner, state: dict[str, Any]) -> LoadPlan:
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    return planner.finish_plan(plan)


def listed(plan: LoadPlan) -> ListedReads:
    reads = reads_of(plan)
    assert isinstance(reads, ListedReads)
    return reads


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of which items are made, from now on."""
    made: list[str] = []

    def noted(reads: _core.Reads) -> list[ReadItem]:
        items = read_items(reads)
        made.extend(item.dest_index.fqn for item in items)
        return items

    def noted_writes(writes: _core.Writes) -> list[WriteItem]:
        items = write_items(writes)
        made.extend(item.index.fqn for item in items)
        return items

    monkeypatch.setattr(load_planner, "read_items", noted)
    monkeypatch.setattr(save_planner, "write_items", noted_writes)
    return made


def test_a_load_makes_items_of_values_alone(tmp_path: Path, made: list[str]) -> None:
    state = {fqn: one for fqn, one in a_state().items() if fqn != "half"}
    tte.save(state, tmp_path, no_dist=True)
    made.clear()
    loaded = {fqn: one for fqn, one in zeros().items() if fqn != "half"}
    tte.load(loaded, tmp_path, no_dist=True)
    assert differences(loaded, state) == []
    assert made == ["value.epoch", "value.name"]


def test_what_the_reader_cannot_fill_gets_its_item(saved: Path, made: list[str]) -> None:
    loaded = zeros()
    tte.load(loaded, saved, no_dist=True)
    assert differences(loaded, a_state()) == []
    assert "half" in made


@pytest.mark.parametrize("loads", ["tte", "dcp"])
def test_a_planner_that_changes_the_final_items_is_followed(saved: Path, loads: str) -> None:
    class WithoutZ(tte.LoadPlanner):
        def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
            plan = super().finish_plan(central_plan)
            for item in list(plan.items):
                if item.dest_index.fqn == "z":
                    plan.items.remove(item)
            return plan

    loaded, expected = zeros(), {**a_state(), "z": torch.zeros(3, 4)}
    if loads == "tte":
        tte.load(loaded, saved, planner=WithoutZ(), no_dist=True)
    else:
        dcp.load(loaded, storage_reader=tte.FileReader(saved), planner=WithoutZ(), no_dist=True)
    assert differences(loaded, expected) == []


def test_items_lie_in_the_order_of_the_files_and_are_made_once(saved: Path) -> None:
    reader = tte.FileReader(saved)
    plan = plan_of(reader, tte.LoadPlanner(), zeros())
    assert isinstance(plan, PlannedReads) and len(listed(plan)) == 5
    assert [item.dest_index.fqn for item in listed(plan)] == ["value.epoch", "value.name", "z", "a", "half"]
    items = plan.items
    assert plan.items is items and reads_of(plan) is items
    places = [reader.storage_data[item.storage_index] for item in items]
    assert [one.offset for one in places] == sorted(one.offset for one in places)
    travelled = pickle.loads(pickle.dumps(plan))
    assert type(travelled) is LoadPlan and travelled == LoadPlan(items, plan.storage_data, plan.planner_data)


def test_a_plan_is_split_with_and_without_its_items(saved: Path) -> None:
    plans = [plan_of(tte.FileReader(saved), tte.LoadPlanner(), zeros()) for _ in range(2)]
    whole = plans[0].items
    (values, tensors), (listed_values, listed_tensors) = map(split_plan, plans)
    assert values == listed_values == [item for item in whole if item.type == LoadItemType.BYTE_IO]
    assert len(listed(listed_tensors)) == 3
    assert tensors.items == listed_tensors.items == [item for item in whole if item.type != LoadItemType.BYTE_IO]


def test_a_reader_of_other_metadata_takes_the_items(saved: Path) -> None:
    loaded, planner = zeros(), tte.LoadPlanner()
    plan = plan_of(tte.FileReader(saved), planner, loaded)
    other = tte.FileReader(saved)
    other.set_up_storage_reader(other.read_metadata(), True)
    other.read_data(plan, planner).wait()
    assert differences(loaded, a_state()) == []


def test_a_list_of_a_key_that_the_metadata_lacks_names_it(
    saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("other")
    tte.save({"z": torch.zeros(2)}, path, no_dist=True)
    other: Metadata = tte.FileReader(path).read_metadata()
    columns = columns_behind(other.storage_data)
    plan = plan_of(tte.FileReader(saved), tte.LoadPlanner(), {"z": torch.zeros(3, 4), "a": zeros()["a"]})
    reads = listed(plan)
    assert columns is not None and reads.with_records().lost is None
    lost = ListedReads(reads.in_core, columns, read_items)
    assert lost.with_records().lost == 0
    reader = tte.FileReader(path)
    reader.set_up_storage_reader(other, True)
    with pytest.raises(KeyError, match="'z'"):
        reader.read_data(PlannedReads(listed=lost), tte.LoadPlanner()).wait()
    assert lost[0].storage_index == MetadataIndex("z", torch.Size([0, 0]))


def plan_of_save(planner: tte.SavePlanner, state: dict[str, Any]) -> SavePlan:
    planner.set_up_planner(state, is_coordinator=True)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    return planner.finish_plan(plan)


def test_a_save_of_tensors_at_hand_makes_no_items(tmp_path: Path, made: list[str]) -> None:
    state = {fqn: a_state()[fqn] for fqn in ("z", "a")}
    tte.save(state, tmp_path / "1", no_dist=True)
    assert made == []
    loaded = {fqn: zeros()[fqn] for fqn in state}
    tte.load(loaded, tmp_path / "1", no_dist=True)
    assert differences(loaded, state) == []


def test_items_of_a_save_are_made_once_and_travel(tmp_path: Path) -> None:
    plan = plan_of_save(tte.SavePlanner(), a_state())
    assert isinstance(plan, PlannedWrites) and len(writes_of(plan)) == 5
    items = plan.items
    assert [item.index.fqn for item in items] == ["value.epoch", "value.name", "z", "a", "half"]
    assert plan.items is items and writes_of(plan) is items
    travelled = pickle.loads(pickle.dumps(plan))
    assert type(travelled) is SavePlan and travelled == SavePlan(items, plan.storage_data, plan.planner_data)


def test_a_planner_that_reorders_the_final_items_is_followed(tmp_path: Path) -> None:
    class Reversed(tte.SavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            plan.items.reverse()
            return plan

    tte.save(a_state(), tmp_path / "reversed", planner=Reversed(), no_dist=True)
    tte.save(a_state(), tmp_path / "as_is", no_dist=True)
    loaded = zeros()
    tte.load(loaded, tmp_path / "reversed", no_dist=True)
    assert differences(loaded, a_state()) == []
    first = [
        min(tte.FileReader(tmp_path / name).read_metadata().storage_data.items(), key=lambda one: one[1].offset)[0].fqn
        for name in ("reversed", "as_is")
    ]
    assert first == ["value.name", "value.epoch"]


def test_a_planner_that_leaves_out_a_final_item_is_refused(tmp_path: Path) -> None:
    class Shorter(tte.SavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            del plan.items[-1]
            return plan

    with pytest.raises(WrongArgumentError, match="lacks items of half"):
        tte.save(a_state(), tmp_path, planner=Shorter(), no_dist=True)
