"""Subclasses of the load planner, written as in the field for DCP's default one: followed, or refused by name.

Each class is a pattern met in a framework, which its docstring names; ours stands where the default planner stood.
"""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import dtensor_steps, index_tensor
from simulated_ranks import load, save, shards
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext.errors import WrongArgumentError

READERS = [tte.FileReader, dcp.FileSystemReader]

WHOLE = index_tensor((8, 2)).float()


def rows(num_ranks: int = 2) -> list[dict[str, Any]]:
    return shards(WHOLE, (num_ranks,), Shard(0))


def test_ours_is_a_default_planner() -> None:
    """As TorchTNT and Composer test for, and DCP's own code casts to."""
    assert isinstance(tte.LoadPlanner(allow_partial_load=True), DefaultLoadPlanner)


# Loads that are refused.


def saved_state(**more: Any) -> Any:
    return save([{"step": 3, **more, **state} for state in rows()])


def targets(**more: Any) -> list[dict[str, Any]]:
    states = [{"step": 0, **more, **state} for state in rows()]
    for state in states:
        state["w"].to_local().zero_()
    return states


def is_loaded(states: list[dict[str, Any]]) -> list[bool]:
    return [torch.equal(state["w"].to_local(), WHOLE[rank * 4 : rank * 4 + 4]) for rank, state in enumerate(states)]


class LoadWithoutSetUp(tte.LoadPlanner):
    """PyTorch's documentation: RenamePlanner; Composer's LoraPlanner."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict({"foo_" + key: v for key, v in state_dict.items()})
        self.metadata, self.is_coordinator = metadata, is_coordinator


class LoadByOwnPlan(tte.LoadPlanner):
    """EasyRec's PartialLoadPlanner, PyTorch's _HuggingFaceLoadPlanner."""

    def create_local_plan(self) -> LoadPlan:
        return create_default_local_load_plan(self.state_dict, self.metadata, False)


class LoadTogether(tte.LoadPlanner):
    """A planner that sends what the targets are in ``planner_data``."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        shapes = [tuple(self.resolve_tensor(i).shape) for i in plan.items if i.dest_index.fqn == "w"]
        return dataclasses.replace(plan, planner_data=shapes)


class LoadByOwnGlobalPlan(tte.LoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (LoadWithoutSetUp, r"call super\(\)\.set_up_planner\("),
        (LoadByOwnPlan, r"with None as planner_data; call super\(\)\.create_local_plan\(\)"),
        (LoadTogether, r"with a list as planner_data; call super\(\)\.create_local_plan\(\)"),
        (LoadByOwnGlobalPlan, r"call super\(\)\.create_global_plan\("),
    ],
)
def test_a_load_is_refused_by_name(make: Callable[[], tte.LoadPlanner], text: str) -> None:
    states = targets()
    with pytest.raises(TypeError, match=text) as caught:
        load(saved_state(), states, make)
    assert isinstance(caught.value, WrongArgumentError)
    assert type(make()).__name__ in str(caught.value) and "load refused" in str(caught.value)
    assert all(state["step"] == 0 and not state["w"].to_local().any() for state in states)


def test_a_value_without_a_place_is_refused() -> None:
    class Renamed(tte.LoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self.state_dict["step"] = self.state_dict.pop("count")

    states = targets(count=1)
    for state in states:
        del state["step"]
    with pytest.raises(TypeError, match="Renamed: its state_dict has values under step, and nothing says where"):
        load(saved_state(), states, Renamed)
    assert [state["count"] for state in states] == [1, 1]


def test_items_changed_before_the_layout_was_decided_are_refused() -> None:
    class Nothing(tte.LoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            return dataclasses.replace(super().create_local_plan(), items=[])

    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    whole = index_tensor((9, 5))
    states = shards(whole, (4, 2), *placements, steps=dtensor_steps(placements))
    saved = save(shards(whole, (3,), Shard(0)))
    with pytest.raises(TypeError, match="Nothing: its items of w were changed before all ranks had decided"):
        load(saved, states, Nothing)


def test_items_of_other_keys_are_read_as_all_ranks_decided() -> None:
    class Less(tte.LoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            return drop(super().create_local_plan())

    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    whole = index_tensor((9, 5))
    states = shards(whole, (4, 2), *placements, steps=dtensor_steps(placements))
    wanted = [state["w"].to_local().clone() for state in states]
    for state in states:
        state["w"].to_local().zero_()
        state["v"] = torch.zeros(2)
    saved = save([{**state, "v": torch.ones(2)} for state in shards(whole, (3,), Shard(0))])
    load(saved, states, Less)
    assert all(torch.equal(state["w"].to_local(), local) for state, local in zip(states, wanted, strict=True))
    assert not any(state["v"].any() for state in states)


# Loads that are followed.


def drop(plan: LoadPlan) -> LoadPlan:
    return dataclasses.replace(plan, items=[item for item in plan.items if item.dest_index.fqn != "v"])


class DropsFromLocalPlan(tte.LoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        return drop(super().create_local_plan())


class DropsInPlace(tte.LoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in [item for item in plan.items if item.dest_index.fqn == "v"]:
            plan.items.remove(item)
        return plan


class DropsBeforeGlobalPlan(tte.LoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return super().create_global_plan([drop(plan) for plan in global_plan])


class DropsFromGlobalPlan(tte.LoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [drop(plan) for plan in super().create_global_plan(global_plan)]


class DropsBeforeFinalPlan(tte.LoadPlanner):
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return super().finish_plan(drop(central_plan))


class DropsFromFinalPlan(tte.LoadPlanner):
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return drop(super().finish_plan(central_plan))


@pytest.mark.parametrize(
    "make",
    [
        DropsFromLocalPlan,
        DropsInPlace,
        DropsBeforeGlobalPlan,
        DropsFromGlobalPlan,
        DropsBeforeFinalPlan,
        DropsFromFinalPlan,
    ],
)
def test_items_that_a_subclass_leaves_out_are_not_read(make: Any) -> None:
    states = targets(v=torch.zeros(2))
    loaded = load(saved_state(v=torch.ones(2)), states, make)
    assert [{item.dest_index.fqn for item in items} for items in loaded.items] == [{"step", "w"}] * 2
    assert is_loaded(states) == [True, True] and not states[0]["v"].any() and states[1]["step"] == 3


def test_items_that_a_subclass_points_elsewhere_are_read_from_there() -> None:
    class FromOther(tte.LoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=[self.moved(item) for item in plan.items])

        def moved(self, item: ReadItem) -> ReadItem:
            index = dataclasses.replace(item.storage_index, fqn="other")
            return dataclasses.replace(item, storage_index=index) if item.dest_index.fqn == "v" else item

    states = targets(v=torch.zeros(2))
    load(saved_state(v=torch.ones(2), other=torch.tensor([5.0, 6.0])), states, FromOther)
    assert torch.equal(states[1]["v"], torch.tensor([5.0, 6.0])) and is_loaded(states) == [True, True]


class RenamesTargets(tte.LoadPlanner):
    """Cosmos' RenameLoadPlanner."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {key.replace("net.", ""): value for key, value in self.state_dict.items()}
        self.mappings = {key.replace("net.", ""): path for key, path in self.mappings.items()}


class RenamesTensors(tte.LoadPlanner):
    """ComposeRL's PPOModelLoadPlanner."""

    def create_local_plan(self) -> LoadPlan:
        self.state_dict = {key.replace("net.w", "w"): value for key, value in self.state_dict.items()}
        return super().create_local_plan()


@pytest.mark.parametrize(("make", "step"), [(RenamesTargets, "net.step"), (RenamesTensors, "step")])
def test_renamed_targets_are_filled_in_their_places(make: Any, step: str) -> None:
    meta = torch.empty(2, device="meta")
    states: list[dict[str, Any]] = []
    for target in targets():
        flat = (
            {"net.w": target["w"], "net.v": meta, step: 0}
            if make is RenamesTargets
            else {"net.w": target["w"], step: 0}
        )
        states.append({})
        for key, value in flat.items():
            holder = states[-1].setdefault("net", {}) if key.startswith("net.") else states[-1]
            holder[key.removeprefix("net.")] = value
    load(saved_state(v=torch.ones(2)), states, make)
    assert is_loaded([{"w": state["net"]["w"]} for state in states]) == [True, True]
    for state in states:
        assert (state["net"]["step"] if make is RenamesTargets else state["step"]) == 3
        assert make is RenamesTensors or torch.equal(state["net"]["v"], torch.ones(2))


def test_targets_that_a_subclass_takes_out_stay_as_they_are() -> None:
    """Guards against extra states of TransformerEngine that older checkpoints lack."""

    class Lenient(tte.LoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            for key in [key for key in self.state_dict if key not in self.metadata.state_dict_metadata]:
                del self.state_dict[key]
            return super().create_local_plan()

    states = targets(extra=torch.zeros(2), note="mine")
    load(saved_state(), states, Lenient)
    assert is_loaded(states) == [True, True] and states[0]["note"] == "mine" and states[0]["step"] == 3


def test_targets_that_a_subclass_makes_out_of_others_are_filled() -> None:
    """Grouped experts: one tensor of the model is many in the checkpoint, through views of it."""

    class Exploded(tte.LoadPlanner):
        def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
            parts = {f"experts.{i}": part for i, part in enumerate(state_dict["grouped"])}
            super().set_up_planner(parts, *args, **kwargs)

    grouped = torch.zeros(3, 2)
    load(save([{"experts": {str(i): torch.full((2,), float(i)) for i in range(3)}}]), [{"grouped": grouped}], Exploded)
    assert torch.equal(grouped, torch.arange(3.0)[:, None].expand(3, 2))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_metadata_that_a_subclass_changes_counts(reader: Any, tmp_path: Path) -> None:
    """A planner that takes wrapper prefixes out of the names of an older checkpoint."""

    class Normalized(tte.LoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            for names, renamed in (
                (metadata.state_dict_metadata, lambda key: key.replace("_orig_mod.", "")),
                (metadata.storage_data, lambda i: dataclasses.replace(i, fqn=i.fqn.replace("_orig_mod.", ""))),
            ):
                old = dict(names.items())
                names.clear()
                names.update({renamed(key): value for key, value in old.items()})
            super().set_up_planner(state_dict, metadata, is_coordinator)

    tte.save({"_orig_mod.w": WHOLE, "_orig_mod.step": 3}, tmp_path)
    for call in (dcp.load, tte.load):
        state = {"w": torch.zeros_like(WHOLE), "step": 0}
        call(state, storage_reader=reader(tmp_path), planner=Normalized())
        assert torch.equal(state["w"], WHOLE) and state["step"] == 3


class ThroughScratch(tte.LoadPlanner):
    """PyTorch's documentation: MetaModelMaterialize; Megatron-Core: contiguous targets for fp8 tensors."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.target = super().resolve_tensor(read_item)
        return torch.full_like(self.target, -1)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor + 1)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value) + 100


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_subclass_takes_what_is_read_as_it_likes(reader: Any, tmp_path: Path) -> None:
    tte.save({"w": WHOLE, "step": 3}, tmp_path)
    for call in (dcp.load, tte.load):
        state = {"w": torch.zeros_like(WHOLE), "step": 0}
        call(state, storage_reader=reader(tmp_path), planner=ThroughScratch())
        assert torch.equal(state["w"], WHOLE + 1) and state["step"] == 103


class CountsFinishes(tte.LoadPlanner):
    finishes = 0

    def finish_load(self) -> None:
        assert torch.equal(self.original_state_dict["w"], WHOLE)
        CountsFinishes.finishes += 1


def test_a_hook_after_the_last_item_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``finish_load`` of pytorch#193909; a DCP that has it calls it itself, and ours is no obstacle to that."""
    tte.save({"w": WHOLE}, tmp_path)
    tte.load({"w": torch.zeros_like(WHOLE)}, tmp_path, planner=CountsFinishes())
    assert CountsFinishes.finishes == 1
    monkeypatch.setattr(DefaultLoadPlanner, "finish_load", lambda self: None, raising=False)
    dcp.load({"w": torch.zeros_like(WHOLE)}, checkpoint_id=tmp_path, planner=CountsFinishes(), no_dist=True)


# PyTorch's own subclasses, with ours put under them by inheritance.


class FromMetadata(_EmptyStateDictLoadPlanner, tte.LoadPlanner):
    """The planner of ``dcp_to_torch_save``, which builds the state dict out of the metadata."""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_state_dict_is_built_out_of_the_metadata(tmp_path: Path) -> None:
    tte.save({"model": {"w": WHOLE, "v": torch.ones(2)}, "opt": {"step": 3, "lr": [0.1, 0.2]}}, tmp_path)
    for keys in (None, {"model"}):
        for load_into in (
            lambda sd, planner: _load_state_dict(sd, tte.FileReader(tmp_path), no_dist=True, planner=planner),
            lambda sd, planner: tte.load(sd, tmp_path, planner=planner),
        ):
            state: dict[str, Any] = {}
            load_into(state, FromMetadata(keys))
            assert torch.equal(state["model"]["w"], WHOLE) and torch.equal(state["model"]["v"], torch.ones(2))
            assert state.keys() == ({"model", "opt"} if keys is None else {"model"})
            assert keys is not None or state["opt"] == {"step": 3, "lr": [0.1, 0.2]}


class FromTorchFile(DynamicMetaLoadPlanner, tte.LoadPlanner):
    """The planner that goes with ``BroadcastingTorchSaveReader``: metadata by the targets of each rank."""


def load_torch_file(rank: int, world_size: int, path: Path) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    if rank == 0:
        torch.save({"w": WHOLE, "nested": {"v": WHOLE + 1}}, path)
    state = {"w": torch.zeros_like(WHOLE), "nested": {"v": torch.zeros_like(WHOLE)}}
    dcp.load(state, checkpoint_id=path, storage_reader=BroadcastingTorchSaveReader(), planner=FromTorchFile())
    assert torch.equal(state["w"], WHOLE) and torch.equal(state["nested"]["v"], WHOLE + 1)
    sharded = {"w": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(0)])}
    try:
        dcp.load(sharded, checkpoint_id=path, storage_reader=BroadcastingTorchSaveReader(), planner=FromTorchFile())
    except CheckpointException as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends")
def test_a_torch_file_is_broadcast_into_plain_targets(run_world: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Into DTensors stock ends in the middle of its collectives: each rank's metadata has its own rows alone."""
    for text in run_world(2, load_torch_file, tmp_path / "model.pt"):
        assert "w: gap in shape (8, 2): element (4, 0) is in no saved chunk" in text
