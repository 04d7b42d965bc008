"""The save planner with simulated ranks in one process: what is written, by whom, and what is refused."""

import enum
import io
import re
import socket
import warnings
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import torch
from boxed_tensors import states_of
from reference import Step, dtensor_steps, fsdp_steps, index_tensor
from simulated_ranks import mesh_at, save, sent, shards
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext.errors import LayoutError, ReplicaMismatchError, StateRefusedError
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY


class Boxes(torch.Tensor):
    """A tensor of which a rank holds [begin, end), and which says so through DCP's hooks."""

    begin: int
    end: int

    @staticmethod
    def of(size: int, begin: int, end: int) -> "Boxes":
        boxes = torch.empty(size).as_subclass(Boxes)
        boxes.begin, boxes.end = begin, end
        return boxes

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.begin]), torch.Size([self.end - self.begin]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return torch.arange(float(self.begin), float(self.end))


# What is written.


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "steps"),
    [
        ((4,), [Shard(0)], None),
        ((4,), [Shard(1)], None),
        ((2, 2), [Replicate(), Shard(0)], None),
        ((4, 2), [_StridedShard(0, split_factor=2), Shard(0)], fsdp_steps),
        ((4, 2), [Shard(0), Shard(0)], None),
        ((3,), [_StridedShard(0, split_factor=3)], None),
        ((2, 2, 2), [Shard(0), Shard(1), Shard(0)], None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_element_is_written_once(mesh_shape: Any, placements: Any, steps: Any) -> None:
    whole = index_tensor((9, 5))
    made = fsdp_steps(placements, 0) if steps is not None else dtensor_steps(placements)
    saved = save(shards(whole, mesh_shape, *placements, steps=made))
    entry = saved.metadata.state_dict_metadata["w"]
    assert entry.size == (9, 5) and entry.properties.dtype == torch.int64
    found = torch.full_like(whole, -1)
    for position, chunk in enumerate(entry.chunks):
        part = found[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
        assert bool((part == -1).all())
        part.copy_(saved.values[MetadataIndex("w", chunk.offsets, position)])
    assert torch.equal(found, whole)
    assert len(saved.values) == len(entry.chunks)


def test_replicas_are_balanced_by_bytes_or_left_to_the_lowest_rank() -> None:
    states = [{f"w{index}": torch.zeros(10 + index) for index in range(8)} for _ in range(4)]
    balanced = [index.fqn for index, rank in save(states).writers.items() if rank == 0]
    assert len(balanced) == 2
    lowest = save(states, lambda: tte.SavePlanner(dedup_save_to_lowest_rank=True))
    assert set(lowest.writers.values()) == {0}


def test_replicas_are_spread_over_the_hosts_that_ranks_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{f"w{index}": torch.zeros(10) for index in range(2)} for _ in range(6)]
    assert set(save(states).writers.values()) == {0, 1}  # all on this host
    hosts = iter(["a", "a", "a", "b", "b", "b"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    assert set(save(states).writers.values()) == {0, 3}


def test_objects_are_written_by_the_lowest_rank_that_has_them() -> None:
    saved = save([{"a": 1}, {"a": 1, "b": 2}, {"b": 2, "rank_2": 3}])
    assert {index.fqn: rank for index, rank in saved.writers.items()} == {"a": 0, "b": 1, "rank_2": 2}


def test_paths_of_all_ranks_are_recorded_as_stock_records_them() -> None:
    saved = save([{"a": {0: {"b": torch.zeros(1)}}}, {"c": [torch.zeros(1)]}])
    assert saved.metadata.planner_data.pop(WORLD_KEY) == {"size": 2, "mesh": {}}
    assert saved.metadata.planner_data == {"a.0.b": ("a", "0", "b"), "c.0": ("c", 0)}
    unflattened = save([{"a": {"b": 1}}], lambda: tte.SavePlanner(flatten_state_dict=False))
    assert unflattened.metadata.planner_data is None and list(unflattened.metadata.state_dict_metadata) == ["a"]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_a_tensor_without_elements_is_a_key_of_the_checkpoint(shape: tuple[int, ...]) -> None:
    saved = save([{"w": torch.empty(shape)}] * 2)
    assert saved.metadata.state_dict_metadata["w"].size == shape
    assert [value.shape for value in saved.values.values()] == [shape]


def test_a_rank_outside_the_mesh_writes_nothing_of_it() -> None:
    states: list[dict[str, Any]] = shards(torch.arange(6.0), (2,), Shard(0))
    outside = mesh_at(5, (2,))
    assert outside.get_coordinate() is None
    states.append(
        {"w": DTensor.from_local(torch.empty(0), outside, [Shard(0)], run_check=False, shape=(6,), stride=(1,))}
    )
    assert set(save(states).writers.values()) == {0, 1}


def test_tensors_that_describe_themselves() -> None:
    saved = save([{"w": Boxes.of(5, 0, 2)}, {"w": Boxes.of(5, 2, 5)}, {"w": Boxes.of(5, 2, 5)}])
    assert torch.equal(torch.cat(list(saved.values.values())), torch.arange(5.0))


# What is refused.


def of_local(local: torch.Tensor, *placements: Placement, shape: tuple[int, ...] = (4,)) -> list[dict[str, Any]]:
    """Two ranks that both hold `local`."""
    stride = torch.empty(shape).stride()
    meshes = [mesh_at(rank, (2,), ("dp",)) for rank in range(2)]
    return [
        {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)}
        for mesh in meshes
    ]


def unequal_replicas() -> list[dict[str, Any]]:
    values = [torch.full((4,), float(rank)) for rank in range(2)]
    return [
        {"w": DTensor.from_local(value, mesh_at(rank, (2,)), [Replicate()], run_check=False)}
        for rank, value in enumerate(values)
    ]


class Unknown(Placement):
    """A placement of somebody else."""


def in_doubt() -> list[dict[str, Any]]:
    placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    return shards(torch.zeros(24, 2), (2, 2), *placements, steps=[Step(1, 0, 3), Step(0, 0)])


SPARSE = torch.eye(3).to_sparse()
QUANTISED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
FAKE = FakeTensorMode().from_tensor(torch.ones(2))
NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
REFUSED: dict[str, tuple[Any, type[StateRefusedError], str]] = {
    "partial": (lambda: of_local(torch.zeros(4), Partial()), LayoutError, r"w: mesh axis 'dp' holds Partial\('sum'\)"),
    "unknown": (lambda: of_local(torch.zeros(4), Unknown()), LayoutError, "w: mesh axis 'dp' has .*redistribute it"),
    "doubt": (in_doubt, LayoutError, r"two ways .*state the order with layouts=\{'w': ShardOrder\(...\)\}"),
    "nothing": (
        lambda: of_local(torch.zeros(3), Shard(0)),
        LayoutError,
        r"rank 0 holds a local tensor of shape \(3,\)",
    ),
    "overlap": (
        lambda: [{"w": Boxes.of(5, 0, 3)}, {"w": Boxes.of(5, 2, 5)}],
        LayoutError,
        r"overlap in shape \(5,\): element \(2,\) is in chunks .* of rank 0; .* of rank 1",
    ),
    "gap": (
        lambda: [{"w": Boxes.of(5, 0, 2)}, {"w": Boxes.of(5, 3, 5)}],
        LayoutError,
        r"gap .* element \(2,\) is held by no",
    ),
    "outside": (lambda: [{"w": Boxes.of(5, 0, 6)}], LayoutError, "out of bounds"),
    "absent": (
        lambda: shards(torch.zeros(8), (4,), Shard(0))[:3],
        LayoutError,
        r"rank\(s\) 3 of its mesh \(4\), placements \[Shard\(0\)\], take no part; pass a process group",
    ),
    "meta": (lambda: [{"w": torch.zeros(3, device="meta")}], LayoutError, "w: is on the meta device and holds no data"),
    "meta_shard": (lambda: of_local(torch.zeros(2, device="meta"), Shard(0)), LayoutError, "is on the meta device"),
    "nested": (
        lambda: [{"w": NESTED}],
        LayoutError,
        r"w: is a nested tensor, .*; store list\(tensor.unbind",
    ),
    "wrapper": (
        lambda: of_local(TwoTensor(torch.zeros(2), torch.zeros(2)), Shard(0)),
        LayoutError,
        "TwoTensor, which no load reads; allow it with torch.serialization.add_safe_globals",
    ),
    "sparse": (lambda: [{"w": SPARSE}], LayoutError, "w: is torch.sparse_coo; convert it with .to_dense"),
    "quantised": (lambda: [{"w": QUANTISED}], LayoutError, "w: is quantised; convert it"),
    "fake": (lambda: [{"w": FAKE}], LayoutError, "w: is a fake tensor, which has no values; give it memory outside"),
    "kind": (
        lambda: [{"w": torch.zeros(1)}, {"w": 1}],
        ReplicaMismatchError,
        "rank 0 has a tensor, rank 1 has a non-tensor value; give different values different keys",
    ),
    "dtype": (
        lambda: [{"w": torch.zeros(1)}, {"w": torch.zeros(1, dtype=torch.int8)}],
        ReplicaMismatchError,
        "rank 0 has dtype torch.float32, rank 1 has dtype torch.int8",
    ),
    "shape": (
        lambda: [{"w": torch.zeros(2, 3)}, {}, {"w": torch.zeros(3, 2)}],
        ReplicaMismatchError,
        r"rank 0 has shape \(2, 3\), rank 2 has shape \(3, 2\)",
    ),
    "objects": (
        lambda: [{"step": 3}, {"step": 3}, {"step": 4}],
        ReplicaMismatchError,
        "step: ranks 0 and 2 should hold the same, .* give each rank a key of its own",
    ),
    "replicas": (
        unequal_replicas,
        ReplicaMismatchError,
        "w: ranks 0 and 1 should hold the same, got bits with digests .*replicas='first'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, error_class, message = REFUSED[case]
    with pytest.raises(error_class, match=message) as caught:
        save(make())
    assert len(caught.value.problems) == 1


def test_all_problems_of_all_ranks_are_in_one_report() -> None:
    states: list[dict[str, Any]] = [{"a": torch.zeros(1), "b": 1}, {"a": torch.zeros(2), "b": 2, "c": SPARSE}]
    with pytest.raises(StateRefusedError) as caught:
        save(states)
    assert {(problem.kind, problem.fqn) for problem in caught.value.problems} == {
        ("ranks_disagree", "a"),
        ("replicas_differ", "b"),
        ("unsupported_tensor", "c"),
    }


def test_plain_tensors_that_differ_are_warned_of_and_the_lowest_rank_is_saved() -> None:
    states = [{"w": torch.full((3,), float(rank))} for rank in range(3)]
    states[0]["rank_0"] = torch.zeros(5)  # by bytes another rank would write what is left
    with pytest.warns(UserWarning, match="the lowest rank's values are saved(.|\n)*w: ranks 0 and 1"):
        saved = save(states)
    assert torch.equal(saved.values[MetadataIndex("w", (0,), 0)], torch.zeros(3))
    assert set(saved.writers.values()) == {0}


def test_plain_tensors_that_differ_may_be_refused() -> None:
    states = [{"w": torch.full((3,), float(rank)), "step": 1} for rank in range(3)]
    with pytest.raises(ReplicaMismatchError, match="w: ranks 0 and 1 should hold the same"):
        save(states, lambda: tte.SavePlanner(replicas="strict"))
    with pytest.raises(ReplicaMismatchError, match="w: ranks 0 and 1 should hold the same"):
        save(unequal_replicas(), lambda: tte.SavePlanner(replicas="strict"))
    save([states[0], states[0]], lambda: tte.SavePlanner(replicas="strict"))


ORDER = tte.layout.ShardOrder(((0, 0, 1),))


def test_a_layout_that_matches_no_key_is_refused() -> None:
    states = [{"layers.0.wqkv.weight": state["w"], "step": 1} for state in shards(torch.zeros(4), (2,), Shard(0))]
    message = r"wkqv.weight: matches no key on any rank; did you mean 'wqkv.weight' \(as in layers.0.wqkv.weight\)\?"
    with pytest.raises(LayoutError, match=message):
        save(states, lambda: tte.SavePlanner(layouts={"wkqv.weight": ORDER}))
    with pytest.raises(LayoutError, match="nothing.like.it: matches no key on any rank; keys are such as layers.0"):
        save(states, lambda: tte.SavePlanner(layouts={"nothing.like.it": ORDER, "*wqkv*": ORDER}))


def test_a_layout_may_match_on_another_rank_only() -> None:
    meshes = [DeviceMesh("cpu", [rank], _init_backend=False, _rank=rank) for rank in (0, 1)]
    parts = [DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False) for mesh in meshes]
    states = [{f"stage_{rank}": part} for rank, part in enumerate(parts)]
    save(states, lambda: tte.SavePlanner(layouts={"stage_1": ORDER}))
    save([{"whole": torch.zeros(2)}], lambda: tte.SavePlanner(layouts={"stage_1": ORDER}))


@pytest.mark.parametrize("replicas", ["warn", "first"])
def test_differing_replicas_may_be_allowed(replicas: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = save([{"step": 3}, {"step": 4}], lambda: tte.SavePlanner(replicas=replicas))
    assert len(caught) == (replicas == "warn")
    assert set(saved.writers.values()) == {0}


def test_large_replicas_are_compared_on_request() -> None:
    states = [{"w": torch.full((100_000,), float(rank))} for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(states)
    with pytest.warns(UserWarning, match="w: ranks 0 and 1 should hold the same"):
        save(states, lambda: tte.SavePlanner(hash_replicas=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "last"}, "got replicas='last', expected 'error', 'strict', 'warn' or 'first'"),
        ({"layouts": {"w": [("dp", 0, 1)]}}, "got list for 'w', expected a ShardOrder"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tte.SavePlanner(**options)


def test_several_boxes_are_refused_by_storage_that_keeps_one() -> None:
    states = shards(torch.arange(12.0), (2,), _StridedShard(0, split_factor=3))
    save(states)
    with pytest.raises(LayoutError, match="w: a rank holds several boxes of it, and safetensors files keep one"):
        save(states, storage_data={"shard_index": 1, "fqn_to_index_mapping": None})
    _, states = states_of("several boxes")
    with pytest.raises(LayoutError, match="w: a rank holds several boxes of it, and safetensors files keep one"):
        save(states, storage_data={"shard_index": 1, "fqn_to_index_mapping": None})
    save(states_of("halves")[1], storage_data={"shard_index": 1, "fqn_to_index_mapping": None})


# One rank that plans alone (use_collectives=False).


def test_without_collectives_each_rank_checks_and_writes_what_it_holds() -> None:
    for rank, state in enumerate(shards(torch.arange(7.0), (3,), Shard(0))):
        planner = tte.SavePlanner()
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        plan = replace(plan, storage_data=f"__{rank}_")
        (plan,), metadata = planner.create_global_plan([plan])
        items = planner.finish_plan(plan).items
        assert [tuple(item.index.offset) for item in items] == [(3 * rank,)]
        assert len(metadata.state_dict_metadata["w"].chunks) == 1


# Subclasses.


def test_the_planner_survives_pickling() -> None:
    order = tte.layout.ShardOrder((("tp", 0, 3), ("dp", 0, 1)))
    planner = sent(tte.SavePlanner(layouts={"*.wqkv": order}, replicas="first"))
    assert isinstance(planner, SavePlanner) and planner.flatten_state_dict
    save([{"step": 1}, {"step": 2}], lambda: sent(planner))


def test_a_subclass_may_change_what_is_written() -> None:
    class Doubled(tte.SavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            return super().transform_object(write_item, value * 2)

    saved = save([{"w": torch.ones(3)}], Doubled)
    assert torch.equal(saved.values[MetadataIndex("w", (0,), 0)], torch.full((3,), 2.0))


def test_items_of_a_plan_made_elsewhere_are_resolved() -> None:
    """As in stock: storage is tested with items made by hand, after ``set_up_planner`` alone."""
    stock, planner = DefaultSavePlanner(), tte.SavePlanner()
    state: dict[str, Any] = {"weight": torch.arange(6.0), "step": 3}
    for each in (stock, planner):
        each.set_up_planner(state, is_coordinator=True)
    weight, step = (planner.resolve_data(item) for item in stock.create_local_plan().items)
    assert isinstance(weight, torch.Tensor) and torch.equal(weight, state["weight"])
    assert isinstance(step, io.BytesIO) and torch.load(io.BytesIO(step.getvalue())) == 3


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(StateRefusedError, match="callbacks.hook: cannot be pickled .*; keep to plain values"):
        save([{"step": 1}, {"callbacks": {"hook": lambda: None}}])


def test_a_subclass_may_pickle_what_the_planner_cannot() -> None:
    class ByName(tte.SavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            return super().transform_object(write_item, value.__name__)

    def hook() -> None:
        pass

    (written,) = save([{"hook": hook}], ByName).values.values()
    assert isinstance(written, bytes)


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Preconditioner:
    mode: Mode


def test_values_that_a_load_will_not_read_are_named_once() -> None:
    states: list[dict[str, Any]] = [
        {"trainer": {"mode": Mode.FAST, "zone": ZoneInfo("UTC"), "path": PurePosixPath("a")}, "rank_0": [Mode.FAST]},
        {"trainer": {"mode": Mode.FAST, "zone": ZoneInfo("UTC"), "path": PurePosixPath("a")}, "rank_1": [Mode.FAST]},
    ]
    with pytest.warns(UserWarning) as caught:
        save(states)
    (text,) = [str(entry.message) for entry in caught]
    for key, name in [("mode", "Mode"), ("zone", "zoneinfo.ZoneInfo")]:
        assert re.search(rf"trainer.{key} \(\S*{name}\)", text)
    assert "rank_0 (" in text and "rank_1 (" in text and "trainer.path" not in text
    assert text.endswith(
        "in the job that loads pass weights_only=False to LoadPlanner or tte.install, if you trust the checkpoint: "
        "allow_classes does not help with zoneinfo.ZoneInfo. Or save what they hold instead"
    )
    with warnings.catch_warnings(), torch.serialization.safe_globals([Mode]):
        warnings.simplefilter("error")
        save([{"mode": Mode.FAST, "step": 1}])


def test_all_classes_that_a_load_needs_are_named() -> None:
    groups = [{"config": Preconditioner(Mode.FAST), "lr": 0.1} for _ in range(20)]
    with pytest.warns(UserWarning, match="a load will refuse") as caught:
        save([{"param_groups": groups, "zone": {"mode": Mode.FAST}}])
    text = str(caught[0].message)
    mode, preconditioner = f"{__name__}.Mode", f"{__name__}.Preconditioner"
    assert f"param_groups.0.config ({mode}, {preconditioner})" in text and "and 11 more" in text
    assert f"pass allow_classes=[{mode}, {preconditioner}] to LoadPlanner or tte.install; or weights" in text
