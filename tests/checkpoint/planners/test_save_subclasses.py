"""Subclasses of the save planner, written as in the field for DCP's default one: followed, or refused by name.

Each class is a pattern met in a framework, which its docstring names; ours stands where the default planner stood.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import index_tensor
from simulated_ranks import save, shards
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import WrongArgumentError

WHOLE = index_tensor((8, 2)).float()


def rows(num_ranks: int = 2) -> list[dict[str, Any]]:
    return shards(WHOLE, (num_ranks,), Shard(0))


def test_ours_is_a_default_planner() -> None:
    """As TorchTNT and Composer test for, and DCP's own code casts to."""
    assert isinstance(tte.SavePlanner(), DefaultSavePlanner)


# Saves that are refused.


class SaveWithoutSetUp(tte.SavePlanner):
    """Composer's tests: flattens the state dict itself."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.mappings = flatten_state_dict(state_dict)
        self.is_coordinator = is_coordinator


class SaveExtraData(tte.SavePlanner):
    """PyTorch's documentation of SavePlanner."""

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data="per-rank-data")


class SaveByOwnPlan(tte.SavePlanner):
    """Megatron-Core, PiPPy: items of its own in the local plan."""

    def create_local_plan(self) -> SavePlan:
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        return dataclasses.replace(plan, planner_data=self.mappings)


class SaveByOwnGlobalPlan(tte.SavePlanner):
    """Composer's SavePlannerWithDedupFix."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        all_plans = [all_plans[0], *(dataclasses.replace(plan, items=[]) for plan in all_plans[1:])]
        global_plan, metadata = create_default_global_save_plan(all_plans)
        if self.flatten_state_dict:
            merged = dict(ChainMap(*(plan.planner_data for plan in global_plan)))
            metadata = dataclasses.replace(metadata, planner_data=merged)
        return global_plan, metadata


class SaveByOwnDedup(tte.SavePlanner):
    """PyTorch's _SavePlannerWithMapping."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans


class SaveLess(tte.SavePlanner):
    """A filter of items in the local plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "w"])


class SaveHalf(tte.SavePlanner):
    """PyTorch's documentation: FP16Planner."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.half()  # type: ignore[union-attr]


class SaveBalanced(tte.SavePlanner):
    """veScale, PyTorch's DDPLoadBalancingPlanner: gives items to other ranks before the global plan."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(
            [all_plans[0], *(dataclasses.replace(plan, items=[]) for plan in all_plans[1:])]
        )


class SaveFinishedLess(tte.SavePlanner):
    """A filter of the plan that a rank is given."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(dataclasses.replace(new_plan, items=new_plan.items[1:]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (SaveWithoutSetUp, r"call super\(\)\.set_up_planner\("),
        (
            SaveExtraData,
            r"per-rank-data. as planner_data; .*call super\(\)\.create_local_plan\(\) and keep its planner_data",
        ),
        (SaveByOwnPlan, r"a dict as planner_data; .*call super\(\)\.create_local_plan\(\) and keep its planner_data"),
        (SaveByOwnGlobalPlan, r"call super\(\)\.create_global_plan\("),
        (lambda: SaveByOwnGlobalPlan(flatten_state_dict=False), r"call super\(\)\.create_global_plan\("),
        (SaveByOwnDedup, "_dedup_save_plans, which .* does not call"),
        (SaveLess, "its items of w are not"),
        (SaveHalf, "its items of step, w are not"),
        (SaveBalanced, "its items of step, w are not"),
        (SaveFinishedLess, "its items of w are not"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_save_is_refused_by_name(make: Callable[[], tte.SavePlanner], text: str) -> None:
    states = [{"step": torch.tensor(3.0), **state} for state in rows()]
    with pytest.raises(TypeError, match=text) as caught:
        save(states, make)
    assert isinstance(caught.value, WrongArgumentError)
    assert type(make()).__name__ in str(caught.value) and "save refused" in str(caught.value)


def test_a_refusal_of_one_rank_is_that_of_all() -> None:
    made = iter([tte.SavePlanner(), SaveWithoutSetUp()])
    with pytest.raises(WrongArgumentError, match="SaveWithoutSetUp: its set_up_planner"):
        save(rows(), lambda: next(made))


def refused_saves(rank: int, world_size: int, path: Path) -> list[str]:
    """By a class on rank 1 alone, and at each step at which a subclass can be refused."""
    texts = []
    cases: list[tuple[Any, str]] = [
        (SaveWithoutSetUp, "SaveWithoutSetUp: "),
        (SaveExtraData, "the planner of rank 1: "),
        (SaveByOwnGlobalPlan, "SaveByOwnGlobalPlan: "),
        (SaveFinishedLess, "SaveFinishedLess: "),
    ]
    for position, (make, name) in enumerate(cases):
        planner = make() if rank == 1 or make is SaveByOwnGlobalPlan else tte.SavePlanner()
        state = {"w": WHOLE, f"rank_{rank}": rank}
        with pytest.raises(WrongArgumentError, match=name) as ours:
            tte.save(state, path / str(position), planner=planner)
        with pytest.raises(CheckpointException, match=name):
            dcp.save(state, checkpoint_id=path / f"dcp{position}", planner=planner)
        texts.append(str(ours.value))
    return texts


def test_a_refusal_is_the_same_on_every_rank(run_world: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_world(2, refused_saves, tmp_path)
    assert first == second
    assert not list(tmp_path.rglob(".metadata"))


# Saves that are followed.


def test_a_planner_that_looks_at_plans_sees_what_each_rank_holds() -> None:
    """Loggers, counters of bytes."""
    seen: dict[str, list[int]] = {"local": [], "global": [], "given": []}

    class Watching(tte.SavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            seen["local"].append(sum(item.tensor_storage_size() or 0 for item in plan.items))
            return plan

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            seen["global"] += [len(plan.items) for plan in all_plans]
            return super().create_global_plan(all_plans)

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            seen["given"].append(len(plan.items))
            return plan

    save([{"step": torch.tensor(3.0), "lr": 0.1, **state} for state in rows()], Watching)
    assert seen == {"local": [68, 68], "global": [3, 3], "given": [3, 1]}


def test_a_state_dict_renamed_on_the_way_in_is_saved_so() -> None:
    """PyTorch's documentation and Composer's tests: RenamePlanner, with the signature of older torch."""

    class Renamed(tte.SavePlanner):
        def set_up_planner(self, state_dict: Any, is_coordinator: bool = False) -> None:  # type: ignore[override]
            super().set_up_planner({"foo_" + key: value for key, value in state_dict.items()}, is_coordinator)  # type: ignore[arg-type]
            assert self.is_coordinator == is_coordinator

    saved = save([{"step": 3, **state} for state in rows()], Renamed)
    assert saved.metadata.state_dict_metadata.keys() == {"foo_step", "foo_w"}


def test_a_flat_state_dict_changed_after_the_set_up_is_saved_so() -> None:
    class Renamed(tte.SavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.state_dict = {"foo_" + key: value for key, value in self.state_dict.items()}

    saved = save([{"opt": {"step": 3}, **state} for state in rows()], Renamed)
    assert saved.metadata.state_dict_metadata.keys() == {"foo_opt.step", "foo_w"}


class WithTopology(tte.SavePlanner):
    """Google's SparseCore planner: an entry of its own in the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["sparsecore"] = {"world_size": len(all_plans)}
        return global_plan, metadata


WRITERS = [tte.FileWriter, dcp.FileSystemWriter]
READERS = [tte.FileReader, dcp.FileSystemReader]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_entry_of_the_metadata_is_kept(writer: Any, tmp_path: Path) -> None:
    for call, path in ((dcp.save, tmp_path / "dcp"), (tte.save, tmp_path / "tte")):
        call({"w": WHOLE}, storage_writer=writer(path), planner=WithTopology())
        for reader in READERS:
            assert reader(path).read_metadata().planner_data["sparsecore"] == {"world_size": 1}


class SaveScaled(tte.SavePlanner):
    """Compressors and encrypters: another value is written for what stands in the state dict."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value + 1 if index.fqn == "step" else value

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return super().transform_object(write_item, -value if write_item.index.fqn == "v" else value)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_values_of_a_subclass_are_those_written(writer: Any, tmp_path: Path) -> None:
    dcp.save({"w": WHOLE, "v": WHOLE, "step": 3}, storage_writer=writer(tmp_path), planner=SaveScaled())
    state: dict[str, Any] = {"w": torch.zeros_like(WHOLE), "v": torch.zeros_like(WHOLE), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert torch.equal(state["w"], WHOLE * 2) and torch.equal(state["v"], WHOLE * -2) and state["step"] == 4


class SaveAllButOne(tte.SavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "v"])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_final_plan_that_leaves_a_key_out_is_no_checkpoint(tmp_path: Path) -> None:
    """The metadata would promise what no file has."""
    with pytest.raises(TypeError, match="SaveAllButOne: the plan .* lacks items of v, "):
        tte.save({"w": WHOLE, "v": WHOLE}, tmp_path, planner=SaveAllButOne())
    assert not (tmp_path / ".metadata").exists()
