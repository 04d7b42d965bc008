"""The load planner with simulated ranks in one process: what is read, by whom, and what is refused before a change."""

import collections
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import dtensor_steps, fsdp_steps, index_tensor
from simulated_ranks import Saved, load, mesh_at, save, sent, shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.errors import (
    CheckpointReadError,
    LayoutError,
    MissingStateError,
    ReplicaMismatchError,
    ReshardError,
    StateRefusedError,
)

Layout = tuple[tuple[int, ...], list[Placement]]

WHOLE = index_tensor((9, 5))
ONE: Layout = ((1,), [Replicate()])
ROWS4: Layout = ((4,), [Shard(0)])  # rows 3, 3, 3, 0
ROWS2: Layout = ((2,), [Shard(0)])  # rows 5, 4
COLUMNS2: Layout = ((2,), [Shard(1)])
HYBRID: Layout = ((2, 2), [Replicate(), Shard(0)])
STRIDED3: Layout = ((3,), [_StridedShard(0, split_factor=3)])  # 3 boxes a rank, of one row each
FSDP_TP: Layout = ((4, 2), [_StridedShard(0, split_factor=2), Shard(0)])  # rows 2, 1, 2, 1, 1, 1, 0, 1 of ranks 0 to 7
FSDP_TP_COLUMNS: Layout = ((2, 2), [Shard(0), Shard(1)])  # boxes of 5 or 4 rows, 3 or 2 columns


def states_of(whole: torch.Tensor, layout: Layout) -> list[dict[str, Any]]:
    mesh_shape, placements = layout
    steps = fsdp_steps(placements, 0) if layout is FSDP_TP else dtensor_steps(placements)
    return shards(whole, mesh_shape, *placements, steps=steps)


def local(state: dict[str, Any]) -> torch.Tensor:
    value = state["w"]
    return value.to_local() if isinstance(value, DTensor) else value


# What is read, and by whom.


@pytest.mark.parametrize(
    ("saved_on", "wanted_on", "num_items"),
    [
        (ROWS4, ROWS4, [1, 1, 1, 0]),
        (ROWS4, ROWS2, [2, 2]),
        (ROWS4, COLUMNS2, [3, 3]),
        (ONE, HYBRID, [1, 1, 1, 1]),
        (HYBRID, ONE, [2]),
        (ROWS4, FSDP_TP_COLUMNS, [2, 2, 2, 2]),
        (FSDP_TP_COLUMNS, ROWS4, [2, 4, 2, 0]),
        (FSDP_TP, ONE, [7]),
        (ONE, FSDP_TP, [1, 1, 1, 1, 1, 1, 0, 1]),
        (FSDP_TP, ROWS2, [3, 4]),
        (STRIDED3, ROWS4, [3, 3, 3, 0]),
        (ROWS4, STRIDED3, [3, 3, 3]),
        (STRIDED3, STRIDED3, [3, 3, 3]),
        (FSDP_TP, STRIDED3, [3, 3, 3]),
    ],
    ids=str,
)
def test_each_rank_reads_its_elements_once_with_the_fewest_items(
    saved_on: Layout, wanted_on: Layout, num_items: list[int]
) -> None:
    states = states_of(torch.full_like(WHOLE, -1), wanted_on)
    loaded = load(save(states_of(WHOLE, saved_on)), states)
    for state, wanted, items in zip(states, states_of(WHOLE, wanted_on), loaded.items, strict=True):
        assert torch.equal(local(state), local(wanted))
        assert sum(item.lengths.numel() for item in items) == local(wanted).numel()
    assert [len(items) for items in loaded.items] == num_items


def test_the_boxes_of_an_item() -> None:
    items = load(save(states_of(WHOLE, ROWS4)), states_of(WHOLE, ROWS2)).items[1]
    first, second = items
    assert first.dest_index == MetadataIndex("w", (5, 0), 0) and first.storage_index == MetadataIndex("w", (3, 0), 1)
    assert (first.storage_offsets, first.dest_offsets, first.lengths) == ((2, 0), (0, 0), (1, 5))
    assert second.storage_index == MetadataIndex("w", (6, 0), 2)
    assert (second.storage_offsets, second.dest_offsets, second.lengths) == ((0, 0), (1, 0), (3, 5))


def test_several_boxes_lie_one_after_the_other_in_the_local_tensor() -> None:
    whole = torch.arange(12.0)
    states = shards(whole * 0, (2,), _StridedShard(0, split_factor=3))
    items = load(save([{"w": whole}]), states).items[1]
    assert [item.storage_offsets for item in items] == [(2,), (6,), (10,)]
    assert [item.dest_offsets for item in items] == [(0,), (2,), (4,)]
    assert torch.equal(local(states[1]), torch.tensor([2.0, 3, 6, 7, 10, 11]))


def test_a_stated_order_holds_for_the_targets() -> None:
    whole = torch.arange(24.0)
    placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    steps = [dtensor_steps([Replicate(), placements[1]])[0], dtensor_steps([Shard(0)])[0]]
    saved = save([{"w": whole}])
    states = shards(whole * 0, (2, 2), *placements, steps=steps)
    with pytest.raises(LayoutError, match=r"state the order with layouts=\{'w'"):
        load(saved, states)
    load(saved, states, lambda: tte.LoadPlanner(layouts={"w": tte.layout.ShardOrder(((1, 0, 3), (0, 0, 1)))}))
    for state, wanted in zip(states, shards(whole, (2, 2), *placements, steps=steps), strict=True):
        assert torch.equal(local(state), local(wanted))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_tensors_without_elements(shape: tuple[int, ...]) -> None:
    state = {"w": torch.zeros(shape)}
    (items,) = load(save([{"w": torch.ones(shape)}]), [state]).items
    assert torch.equal(state["w"], torch.ones(shape)) and len(items) == (shape == ())


def test_a_rank_outside_the_mesh_reads_nothing_of_it() -> None:
    states = shards(torch.zeros(6), (2,), Shard(0))
    outside = mesh_at(5, (2,))
    states.append(
        {"w": DTensor.from_local(torch.empty(0), outside, [Shard(0)], run_check=False, shape=(6,), stride=(1,))}
    )
    assert [len(items) for items in load(save([{"w": torch.arange(6.0)}]), states).items] == [1, 1, 0]


class Held(torch.Tensor):
    """A tensor of which a rank holds the elements from ``begin`` on, and which says so through DCP's hooks."""

    begin: int
    held: torch.Tensor

    @staticmethod
    def of(size: int, begin: int, end: int) -> "Held":
        tensor = torch.empty(size).as_subclass(Held)
        tensor.begin, tensor.held = begin, torch.zeros(end - begin)
        return tensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.begin]), torch.Size(self.held.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset == (self.begin,)
        return self.held


def test_tensors_that_describe_themselves() -> None:
    states = [{"w": Held.of(7, 0, 3)}, {"w": Held.of(7, 3, 7)}]
    load(save(shards(torch.arange(7.0), (3,), Shard(0))), states)
    assert torch.equal(torch.cat([state["w"].held for state in states]), torch.arange(7.0))


def test_values_are_put_where_they_stand_and_containers_stay() -> None:
    saved = save([{"a": {7: {"step": 3}}, "b": [torch.ones(2), 4], "c": (torch.ones(1), "new"), "lr": 0.5}])
    state: dict[str, Any] = {"a": {7: {"step": 0}}, "b": [torch.zeros(2), 0], "c": (torch.zeros(1), "old"), "lr": 0.0}
    inner, sequence, tensor = state["a"][7], state["b"], state["b"][0]
    load(saved, [state])
    assert inner == {"step": 3} and state["lr"] == 0.5 and state["c"] == (torch.ones(1), "new")
    assert state["b"] is sequence and sequence[0] is tensor and sequence[1] == 4 and bool((tensor == 1).all())


def test_keys_that_nobody_asks_for_stay_unread() -> None:
    (items,) = load(save([{"a": torch.ones(2), "b": torch.ones(2), "n": 1}]), [{"b": torch.zeros(2)}]).items
    assert [item.dest_index.fqn for item in items] == ["b"]


def test_without_flattening_the_top_level_keys_are_the_keys() -> None:
    whole = torch.arange(5.0)
    saved = save([{"w": whole, "config": {"depth": 2}}], lambda: tte.SavePlanner(flatten_state_dict=False))
    state: dict[str, Any] = {"w": torch.zeros(5), "config": {}}
    (items,) = load(saved, [state], lambda: tte.LoadPlanner(flatten_state_dict=False)).items
    assert torch.equal(state["w"], whole) and state["config"] == {"depth": 2}
    assert {item.dest_index.fqn: item.type for item in items} == {
        "w": LoadItemType.TENSOR,
        "config": LoadItemType.BYTE_IO,
    }


def test_meta_targets_get_memory_when_the_plan_is_made() -> None:
    states: list[dict[str, Any]] = shards(torch.empty(7, device="meta"), (2,), Shard(0))
    for state in states:
        state["plain"] = [torch.empty(3, device="meta")]
    load(save([{"w": torch.arange(7.0), "plain": [torch.ones(3)]}]), states)
    assert torch.equal(torch.cat([local(state) for state in states]), torch.arange(7.0))
    assert all(torch.equal(state["plain"][0], torch.ones(3)) for state in states)


@pytest.mark.parametrize(
    ("saved_dtype", "wanted_dtype", "cast", "is_refused"),
    [
        (torch.bfloat16, torch.float32, "exact", False),
        (torch.bfloat16, torch.float32, "forbid", True),
        (torch.float32, torch.bfloat16, "exact", True),
        (torch.float32, torch.bfloat16, "allow", False),
        (torch.float32, torch.int64, "allow", True),
    ],
    ids=str,
)
def test_casts(saved_dtype: torch.dtype, wanted_dtype: torch.dtype, cast: Any, is_refused: bool) -> None:
    saved = save([{"w": torch.ones(3, dtype=saved_dtype)}])
    state = {"w": torch.zeros(3, dtype=wanted_dtype)}
    if is_refused:
        with pytest.raises(ReshardError, match=f"w: .*{saved_dtype}.*{wanted_dtype}"):
            load(saved, [state], lambda: tte.LoadPlanner(cast=cast))
    else:
        load(saved, [state], lambda: tte.LoadPlanner(cast=cast))
    assert bool((state["w"] == (not is_refused)).all()) and state["w"].dtype == wanted_dtype


def test_a_refusal_for_the_dtype_names_each_key_once_and_keeps_the_mesh() -> None:
    saved = save(shards(torch.zeros(8), (4,), Shard(0)))
    mesh = mesh_at(0, (1,), ("dp",))
    target = DTensor.from_local(torch.zeros(8, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
    with pytest.raises(ReshardError) as refused:
        load(saved, [{"w": target}], lambda: tte.LoadPlanner(policy=ElasticPolicy()))
    assert [problem.kind for problem in refused.value.problems] == ["wrong_dtype"]
    assert "loaded by 1 rank (dp 1)" in str(refused.value) and "unexpected" not in str(refused.value)


def test_what_has_another_kind_is_asked_for_all_the_same() -> None:
    with pytest.raises(ReshardError) as refused:
        load(save([{"step": 3}]), [{"step": torch.zeros(2)}], lambda: tte.LoadPlanner(policy=ElasticPolicy()))
    assert [problem.kind for problem in refused.value.problems] == ["wrong_type"]
    assert refused.value.report.unexpected == ()


def test_a_cast_does_not_hide_the_rest() -> None:
    saved = save([{"w": torch.zeros(3), "gone": torch.zeros(2)}])
    with pytest.raises(ReshardError) as refused:
        targets = {"w": torch.zeros(3, dtype=torch.bfloat16)}
        load(saved, [targets], lambda: tte.LoadPlanner(policy=ElasticPolicy()))
    assert "w: saved as torch.float32" in str(refused.value) and "pass cast='allow' to accept" in str(refused.value)
    assert [problem.fqn for problem in refused.value.problems] == ["w", "gone"]


# What is refused, before a target changes.


def rows(saved: Callable[[], dict[str, Any]] = dict) -> Saved:
    """A checkpoint of a sharded ``w`` of 8 elements, and of what one rank adds."""
    first, *others = shards(torch.arange(8.0), (4,), Shard(0))
    return save([{**first, **saved()}, *others])


def of_dataloader(num_ranks: int) -> dict[str, Any]:
    return {"dataloader": {f"dp_rank_{rank}": {"next": rank} for rank in range(num_ranks)}}


def of_chunks(*boxes: tuple[int, int]) -> Saved:
    """A checkpoint whose metadata says that it has these boxes of ``w``."""
    saved = rows()
    saved.metadata.state_dict_metadata["w"].chunks[:] = [
        ChunkStorageMetadata(torch.Size([begin]), torch.Size([end - begin])) for begin, end in boxes
    ]
    return saved


def partial() -> list[dict[str, Any]]:
    return [
        {"w": DTensor.from_local(torch.zeros(8), mesh_at(rank, (2,), ("dp",)), [Partial()], run_check=False)}
        for rank in range(2)
    ]


REFUSED: dict[str, tuple[Callable[[], Saved], Callable[[], list[dict[str, Any]]], type[StateRefusedError], str]] = {
    "missing": (
        rows,
        lambda: [{"w": torch.zeros(8)}, {"w": torch.zeros(8), "b": torch.zeros(1)}],
        MissingStateError,
        "Missing key in checkpoint state_dict: b.",
    ),
    "missing_prefix": (
        lambda: save([{"module.w": torch.ones(8)}]),
        lambda: [{"w": torch.zeros(8)}],
        MissingStateError,
        "It has module.w, which differs only by prefix",
    ),
    "shape": (
        rows,
        lambda: [{"w": torch.zeros(8)}, {"w": torch.zeros(9)}],
        ReshardError,
        r"Size mismatch between saved torch.Size\(\[8\]\) and current: torch.Size\(\[9\]\) for w; build the model",
    ),
    "value_for_tensor": (rows, lambda: [{"w": 0}], ReshardError, "the checkpoint has a tensor, the target is a non-t"),
    "tensor_for_value": (
        lambda: rows(lambda: {"step": 3}),
        lambda: [{"w": torch.zeros(8), "step": torch.zeros(1)}],
        ReshardError,
        "step: the checkpoint has a non-tensor value, the target is a tensor; put a target of the saved kind there",
    ),
    "gap": (
        lambda: of_chunks((0, 2), (4, 6), (6, 8)),
        lambda: [{"w": torch.zeros(8)}],
        ReshardError,
        r"w: gap in shape \(8,\): element \(2,\) is in no saved chunk",
    ),
    "overlap": (
        lambda: of_chunks((0, 3), (2, 6), (6, 8)),
        lambda: [{"w": torch.zeros(8)}],
        ReshardError,
        r"w: overlap in shape \(8,\): element \(2,\) is in chunks \(0,\)\+\(3,\); \(2,\)\+\(4,\)",
    ),
    "outside": (
        lambda: of_chunks((0, 6), (6, 9)),
        lambda: [{"w": torch.zeros(8)}],
        ReshardError,
        "w: out of bounds .*lies outside the tensor",
    ),
    "gap_and_overlap": (
        lambda: of_chunks((0, 3), (2, 4), (4, 6), (6, 7)),
        lambda: [{"w": torch.zeros(8)}],
        ReshardError,
        "w: (gap|overlap)",
    ),
    "gap_elsewhere": (
        lambda: of_chunks((0, 2), (2, 4), (4, 6)),
        lambda: shards(torch.zeros(8), (2,), Shard(0)),
        ReshardError,
        "w: gap",
    ),
    "unclaimed": (
        lambda: rows(lambda: of_dataloader(4)),
        lambda: [{"w": torch.zeros(8), **of_dataloader(2)}] * 2,
        ReshardError,
        r"dataloader.dp_rank_\*.*the checkpoint has 4 of these, the 2 rank\(s\) of this load ask for 2; "
        r"dataloader.dp_rank_2.* would be dropped",
    ),
    "partial": (rows, partial, LayoutError, r"w: mesh axis 'dp' holds Partial\('sum'\)"),
    "dtypes_of_ranks": (
        rows,
        lambda: [{"w": torch.zeros(8)}, {"w": torch.zeros(8, dtype=torch.float64)}],
        ReplicaMismatchError,
        "w: rank 0 has dtype torch.float32, rank 1 has dtype torch.float64",
    ),
    "meta": (
        rows,
        lambda: [{"w": torch.zeros(8, device="meta"), "b": torch.zeros(1, device="meta")}],
        MissingStateError,
        "Missing key in checkpoint state_dict: b",
    ),
}


def bits(states: list[dict[str, Any]]) -> bytes:
    return pickle.dumps([[local({"w": value}) for value in state.values()] for state in states])


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    saved, make, error_class, message = REFUSED[case]
    states = make()
    before = bits(states)
    with pytest.raises(error_class, match=message) as caught:
        load(saved(), states)
    assert len(caught.value.problems) == 1
    assert bits(states) == before


def test_all_problems_of_all_ranks_are_in_one_report() -> None:
    states: list[dict[str, Any]] = [
        {"w": torch.zeros(9), "step": 0},
        {"step": torch.zeros(1), "absent": 0},
        {"w": torch.zeros(8, dtype=torch.int8)},
    ]
    with pytest.raises(StateRefusedError) as caught:
        load(rows(lambda: {"step": 3}), states)
    assert {(problem.kind, problem.fqn) for problem in caught.value.problems} == {
        ("wrong_shape", "w"),
        ("wrong_dtype", "w"),
        ("wrong_type", "step"),
        ("missing_key", "absent"),
    }


def test_unclaimed_entries_of_ranks_may_be_allowed() -> None:
    saved = save([of_dataloader(4)])
    states = [of_dataloader(1)]
    with pytest.raises(ReshardError, match=r"pass LoadPlanner\(allow_unclaimed=\['dataloader.dp_rank_\*.next'\]\)"):
        load(saved, states)
    load(saved, states, lambda: tte.LoadPlanner(allow_unclaimed=["dataloader.dp_rank_*"]))
    # Nobody asks for any: the part of the checkpoint is not loaded at all. All layers have numbers, and are no ranks.
    load(rows(lambda: of_dataloader(4)), [{"w": torch.zeros(8)}])
    layers = {f"layers.{index}": index for index in range(4)}
    load(save([layers]), [{"layers.0": 9}])


def test_a_partial_load_leaves_what_the_checkpoint_lacks() -> None:
    def make() -> tte.LoadPlanner:
        return tte.LoadPlanner(allow_partial_load=True)

    states = [{"w": torch.zeros(8), "b": torch.zeros(1), "n": 1}]
    load(rows(), states, make)
    assert torch.equal(states[0]["w"], torch.arange(8.0)) and states[0]["b"] == 0 and states[0]["n"] == 1
    with pytest.raises(ReshardError, match="Size mismatch"):
        load(rows(), [{"w": torch.zeros(9), "b": torch.zeros(1)}], make)
    with pytest.raises(MissingStateError, match="found none of the 2 wanted keys; the checkpoint has w and others"):
        load(rows(), [{"model.w": torch.zeros(8), "model.b": torch.zeros(1)}], make)


def test_a_partial_load_may_find_nothing_for_some_ranks() -> None:
    # A pipeline stage that has only layers which the checkpoint lacks.
    states = [{"w": torch.zeros(8)}, {"new": torch.zeros(2)}]
    load(rows(), states, lambda: tte.LoadPlanner(allow_partial_load=True))
    assert torch.equal(states[0]["w"], torch.arange(8.0)) and not states[1]["new"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cast": "always"}, "got cast='always', expected 'exact', 'allow' or 'forbid'"),
        ({"allow_unclaimed": "a.*"}, r"got allow_unclaimed='a.\*', expected a list of globs"),
        ({"allow_classes": "m.A"}, "got allow_classes='m.A', expected a list of classes"),
        ({"allow_classes": dict}, "got allow_classes=the class dict, expected a list of classes"),
        ({"allow_classes": ["m.A"]}, "got 'm.A' in allow_classes, expected classes"),
        ({"allow_classes": [dict, getattr]}, "got builtins.getattr in allow_classes, expected classes"),
        ({"layouts": {"w": [("dp", 0, 1)]}}, "got list for 'w', expected a ShardOrder"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tte.LoadPlanner(**options)


def test_a_checkpoint_without_metadata() -> None:
    with pytest.raises(ValueError, match="has no .metadata file, or it is not finished"):
        tte.LoadPlanner().set_up_planner({}, None, is_coordinator=True)


class Outsider:
    """A class that nothing allows to be loaded."""


def test_values_of_foreign_classes_are_read_on_request_only() -> None:
    saved = save([{"hook": Outsider()}])
    state = {"hook": None}
    with pytest.raises(CheckpointReadError, match="load: cannot read hook: (.|\n)*Outsider"):
        load(saved, [state])
    load(saved, [state], lambda: tte.LoadPlanner(weights_only=False))
    assert isinstance(state["hook"], Outsider)


class Stranger:
    """Another one."""


def test_foreign_classes_of_all_values_are_named_at_once() -> None:
    values = {"a": Outsider(), "b": 3, "c": [Stranger()], "d": collections.deque([1])}
    saved = save([values])
    state: dict[str, Any] = {"a": None, "b": None, "c": None, "e": None}
    names = f"{__name__}.Outsider, {__name__}.Stranger"
    allowing = rf"pass allow_classes=\[{names}\] to LoadPlanner or tte.install; or weights_only=False to"
    with pytest.raises(
        CheckpointReadError, match=rf"cannot read a, c: they are not plain data \(found {names}\); {allowing}"
    ):
        load(saved, [state], lambda: tte.LoadPlanner(allow_partial_load=True))
    with pytest.raises(CheckpointReadError, match=r"cannot read c: it is not plain data \(found \S*Stranger\)"):
        load(saved, [state], lambda: tte.LoadPlanner(allow_partial_load=True, allow_classes=[Outsider]))
    planner = tte.LoadPlanner(allow_partial_load=True, allow_classes=[Outsider, Stranger])
    load(saved, [state], lambda: planner)
    assert isinstance(state["a"], Outsider) and state["b"] == 3 and isinstance(state["c"][0], Stranger)
    with pytest.raises(CheckpointReadError, match="cannot read d: .* allow_classes does not help with collections.deq"):
        load(saved, [{"d": None}], lambda: planner)


def test_a_subclass_that_keeps_values_to_itself_hides_no_foreign_class() -> None:
    class Keeping(tte.LoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            if read_item.dest_index.fqn != "b":
                super().load_bytes(read_item, value)

    saved = save([{"a": Outsider(), "b": 3}])
    with pytest.raises(CheckpointReadError, match="cannot read a: it is not plain data"):
        load(saved, [{"a": None, "b": None}], Keeping)


# Ranks that saved alone (use_collectives=False).


def saved_alone(states: list[dict[str, Any]]) -> list[Saved]:
    """What each rank saved for itself, with a metadata file of its own."""
    all_saved = []
    for rank, state in enumerate(states):
        saved = save([state], storage_data=f"__{rank}_")
        chunks = saved.metadata.state_dict_metadata["w"].chunks
        saved.metadata.storage_data = {MetadataIndex("w", chunk.offsets): f"__{rank}_0.distcp" for chunk in chunks}
        all_saved.append(saved)
    return all_saved


def test_without_collectives_each_rank_reads_what_it_saved() -> None:
    saved = saved_alone(states_of(WHOLE, STRIDED3))
    states = states_of(WHOLE * 0, STRIDED3)
    load(saved, states)
    for rank, (state, wanted) in enumerate(zip(states, states_of(WHOLE, STRIDED3), strict=True)):
        assert torch.equal(local(state), local(wanted))
        local(state).zero_()
        load(saved[rank], [state])
        assert torch.equal(local(state), local(wanted))


def test_without_collectives_another_mesh_is_refused_by_the_rank_that_lacks_elements() -> None:
    saved = saved_alone(states_of(WHOLE, ROWS2))
    states: list[dict[str, Any]] = states_of(torch.zeros_like(WHOLE, device="meta"), COLUMNS2)
    with pytest.raises(ReshardError, match="w: this rank holds 27 elements, the metadata .* has 15 of them; load on"):
        load(saved, states)
    with pytest.raises(ReshardError, match="w: gap"):
        load(saved[0], states[:1])
    saved[0].metadata.state_dict_metadata["w"].chunks *= 2
    with pytest.raises(ReshardError, match="w: this rank holds 25 elements, the metadata .* has 50 of them"):
        load(saved, states_of(torch.zeros_like(WHOLE), ROWS2))
    assert all(local(state).is_meta for state in states)


# What a policy and a source select.


def renamed(**options: Any) -> Callable[[], tte.LoadPlanner]:
    return lambda: tte.LoadPlanner(source=Source(rename={"model.*": "module.*"}, **options))


def test_a_source_renames_keys() -> None:
    saved = save([{"module": {"w": torch.ones(8), "n": 3}}])
    state: dict[str, Any] = {"model": {"w": torch.zeros(8), "n": 0}}
    (items,) = load(saved, [state], renamed()).items
    assert {(item.dest_index.fqn, item.storage_index.fqn) for item in items} == {
        ("model.w", "module.w"),
        ("model.n", "module.n"),
    }
    assert bool((state["model"]["w"] == 1).all()) and state["model"]["n"] == 3
    with pytest.raises(ReshardError, match="Size mismatch .* for model.w"):
        load(saved, [{"model": {"w": torch.zeros(9)}}], renamed())
    with pytest.raises(MissingStateError, match="Missing key in checkpoint state_dict: model.b"):
        load(saved, [{"model": {"b": 0}}], renamed())


def test_a_source_selects_keys() -> None:
    saved = save([{"a": 1, "b": 1}])
    state = {"a": 0, "b": 0, "not_saved": 0}
    load(saved, [state], lambda: tte.LoadPlanner(source=Source(exclude=["a", "not_saved"])))
    assert state == {"a": 0, "b": 1, "not_saved": 0}


def under(*arguments: Any, **options: Any) -> Callable[[], tte.LoadPlanner]:
    return lambda: tte.LoadPlanner(policy=ElasticPolicy(*arguments, **options))


def test_components_that_a_policy_leaves_out_stay_as_they_are() -> None:
    saved = save([{"model": {"w": torch.ones(2)}, "lr": {"step": 3}, "rng": 1}] * 2)
    states: list[dict[str, Any]] = [{"model": {"w": torch.zeros(3)}, "lr": {"step": 0}, "rng": 0} for _ in range(3)]
    loaded = load(saved, states, under({"model.w": "reset", "rng": "omit"}))
    for state in states:
        assert state["lr"] == {"step": 3} and state["rng"] == 0 and bool((state["model"]["w"] == 0).all())
    reports = [planner.report for planner in loaded.planners]
    assert reports[0] is not None and reports[1:] == reports[:1] * 2
    assert (reports[0].old.size, reports[0].new.size) == (2, 3)
    assert [(line.name, line.action, line.outcome) for line in reports[0].components] == [
        ("model", "reshard", "left as is"),
        ("lr", "reshard", "1 entry"),
        ("rng", "omit", "left as is"),
    ]


def test_missing_and_unexpected_keys_of_a_component_are_refused_together_or_reported() -> None:
    saved = save([{"model": {"w": torch.ones(2), "old": torch.ones(2)}, "other": 1}])
    state: dict[str, Any] = {"model": {"w": torch.zeros(2), "new": torch.zeros(2)}}
    with pytest.raises(StateRefusedError, match="model.old") as caught:
        load(saved, [state], under())
    assert {(problem.kind, problem.fqn) for problem in caught.value.problems} == {
        ("missing_key", "model.new"),
        ("unexpected_key", "model.old"),
    }
    assert bool((state["model"]["w"] == 0).all())
    policy = ElasticPolicy({"model.new": "reset", "model.old": "omit"})
    for make in (under(strict="ignore"), lambda: tte.LoadPlanner(policy=policy)):
        (planner,) = load(saved, [state], make).planners
        assert bool((state["model"]["w"] == 1).all()) and bool((state["model"]["new"] == 0).all())
        state["model"]["w"].zero_()
    (planner,) = load(saved, [state], under(strict="warn")).planners
    assert planner.report is not None
    assert planner.report.missing == ("model.new",) and planner.report.unexpected == ("model.old",)


def test_a_component_that_must_not_cross_is_refused_in_another_world() -> None:
    saved = save([{"lr": {"step": 3}}] * 2)
    make = under({"lr": "error"})
    load(saved, [{"lr": {"step": 0}} for _ in range(2)], make)
    with pytest.raises(ReshardError, match="lr: its action is 'error', and it was saved by 2 ranks, not by 1 rank"):
        load(saved, [{"lr": {"step": 0}}], make)


# Subclasses.


def test_the_planner_survives_pickling() -> None:
    planner: tte.LoadPlanner = sent(tte.LoadPlanner(cast="allow", source=Source(exclude=["b"])))
    assert isinstance(planner, LoadPlanner)
    (loaded,) = load(rows(), [{"w": torch.zeros(8, dtype=torch.bfloat16), "b": 1}], lambda: sent(planner)).planners
    assert loaded.report is None and loaded.state_dict["b"] == 1


def test_a_subclass_may_change_where_a_tensor_is_read() -> None:
    class Upper(tte.LoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return upper

    upper = torch.zeros(8)
    state = {"w": torch.zeros(8)}
    load(rows(), [state], Upper)
    assert bool((state["w"] == 0).all()) and torch.equal(upper, torch.arange(8.0))


def test_a_layout_that_matches_nothing_is_refused() -> None:
    order = tte.layout.ShardOrder(((0, 0, 1),))
    saved = save([{"layers.0.wqkv": WHOLE, "head": WHOLE}])
    states = [{"head": state["w"]} for state in states_of(WHOLE, ROWS2)]
    load(saved, states, lambda: tte.LoadPlanner(layouts={"wqkv": order}))
    with pytest.raises(LayoutError, match=r"wkqv: matches no key on any rank; did you mean 'wqkv' \(as in layers"):
        load(saved, states, lambda: tte.LoadPlanner(layouts={"wkqv": order}))
    load(saved, [{"head": torch.zeros_like(WHOLE)}], lambda: tte.LoadPlanner(layouts={"wkqv": order}))


NUMBERS: list[tuple[Any, Any, Any]] = [
    (0.001, torch.tensor(0.0), torch.tensor(0.001)),
    (0.001, torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.001, dtype=torch.float64)),
    (7, torch.tensor(0), torch.tensor(7)),
    (7, torch.tensor(0.0), torch.tensor(7.0)),
    (True, torch.tensor(0), torch.tensor(1)),
    (0.5, torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(0.5, dtype=torch.bfloat16)),
    (float("inf"), torch.tensor(0.0), torch.tensor(float("inf"))),
    (torch.tensor(7), 0, 7),
    (torch.tensor(7.0), 0, 7),
    (torch.tensor(0.5), 0.0, 0.5),
    (torch.tensor(7), 0.0, 7.0),
    (torch.tensor(True), False, True),
]


@pytest.mark.parametrize(("saved_value", "target", "expected"), NUMBERS, ids=str)
def test_a_number_and_a_tensor_without_dims_become_each_other(saved_value: Any, target: Any, expected: Any) -> None:
    state = {"group": {"lr": target}}
    load(save([{"group": {"lr": saved_value}}]), [state])
    loaded = state["group"]["lr"]
    assert type(loaded) is type(expected) and bool(loaded == expected)
    if isinstance(target, torch.Tensor):
        assert loaded is target and target.dtype == expected.dtype


def test_a_number_fills_a_replicated_dtensor_and_a_tensor_on_meta() -> None:
    mesh = mesh_at(0, (1,))
    target = DTensor.from_local(torch.tensor(0.0), mesh, [Replicate()], run_check=False)
    state = {"lr": target, "step": torch.empty((), device="meta")}
    version = target._version
    load(save([{"lr": 0.5, "step": 3}]), [state])
    assert state["lr"] is target and target.to_local().item() == 0.5 and target._version > version
    assert state["step"].item() == 3.0


NOT_NUMBERS: list[tuple[Any, Any, str]] = [
    ("0.1", torch.tensor(0.0), "it is a str, the target is a tensor"),
    ((torch.ones(3),), torch.tensor(0.0), "it is a tuple, the target is a tensor"),
    (2**24 + 1, torch.tensor(0.0), "which cannot hold that number"),
    (300, torch.tensor(0, dtype=torch.uint8), "which cannot hold that number"),
    (0.001, torch.tensor(0.0, dtype=torch.bfloat16), "which cannot hold that number"),
    (1e300, torch.tensor(0.0), "which cannot hold that number"),
    (0.5, torch.tensor(0), "which cannot hold that number"),
    (1, torch.tensor(False), "which cannot hold that number"),
    (torch.tensor(0.5), 0, "the target is a int, which cannot be that number"),
    (torch.tensor(float("nan")), 0, "the target is a int, which cannot be that number"),
    (torch.tensor(2**53 + 1), 0.0, "the target is a float, which cannot be that number"),
    (torch.tensor(1), False, "the target is a bool, which cannot be that number"),
]


@pytest.mark.parametrize(("saved_value", "target", "message"), NOT_NUMBERS, ids=str)
def test_numbers_that_would_become_others_are_refused(saved_value: Any, target: Any, message: str) -> None:
    saved = save([{"lr": saved_value}])
    state = {"lr": copy.deepcopy(target)}
    with pytest.raises(CheckpointReadError, match=f"lr: .*{message}"):
        load(saved, [state])
    assert type(state["lr"]) is type(target) and state["lr"] == target


def test_tuples_of_tensors_are_read_in_either_form() -> None:
    whole = save([{"pair": (torch.arange(3.0), {"n": 1}, [torch.ones(2)])}])
    assert list(whole.metadata.state_dict_metadata) == ["pair"]
    walked = save([{"pair": [torch.arange(3.0), {"n": 1}, [torch.ones(2)]]}])
    assert "pair.2.0" in walked.metadata.state_dict_metadata
    for saved in (whole, walked):
        state = {"pair": (torch.zeros(3), {"n": 0}, [torch.zeros(2)])}
        load(saved, [state])
        assert torch.equal(state["pair"][0], torch.arange(3.0)) and state["pair"][1] == {"n": 1}
        assert torch.equal(state["pair"][2][0], torch.ones(2))
        renamed = {"other": (torch.zeros(3), {"n": 0}, [torch.zeros(2)])}
        load(saved, [renamed], lambda: tte.LoadPlanner(source=Source(rename={"other*": "pair*"})))
        assert torch.equal(renamed["other"][0], torch.arange(3.0))


def test_tensors_in_tuples_and_values_that_hold_themselves_are_placed() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    state: dict[str, Any] = {"pair": (torch.empty(3, device="meta"), 0), "cycle": [0, 0]}
    state["cycle"][1] = state["cycle"]
    load(save([{"pair": (torch.arange(3.0), 1), "cycle": cycle}]), [state])
    assert torch.equal(state["pair"][0], torch.arange(3.0)) and state["cycle"][1][1][0] == 1


def test_one_value_does_not_replace_dtensors() -> None:
    saved = save([{"pair": (torch.arange(8.0), 1)}])
    states = [{"pair": (state["w"], 1)} for state in states_of(torch.zeros(8), ROWS2)]
    with pytest.raises(ReshardError, match="pair: the checkpoint has it as one value, .* the target holds DTensors"):
        load(saved, states)


def test_items_of_a_plan_made_elsewhere_are_filled() -> None:
    """As in stock: storage is tested with items made by hand, after ``set_up_planner`` alone."""
    metadata = save([{"weight": torch.arange(6.0), "step": 3}]).metadata
    stock, planner = DefaultLoadPlanner(), tte.LoadPlanner()
    state: dict[str, Any] = {"weight": torch.zeros(6), "step": 0}
    for each in (stock, planner):
        each.set_up_planner(state, metadata)
    for item in stock.create_local_plan().items:
        if item.type == LoadItemType.BYTE_IO:
            value = io.BytesIO()
            torch.save(3, value)
            planner.load_bytes(item, io.BytesIO(value.getvalue()))
        else:
            target = planner.resolve_tensor(item)
            target.copy_(torch.arange(6.0))
            planner.commit_tensor(item, target)
    assert torch.equal(state["weight"], torch.arange(6.0)) and state["step"] == 3
