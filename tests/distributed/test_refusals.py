"""What is refused, with which words, on every rank alike; a refusal writes no file and changes no target."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    INTERLEAVED_QKV,
    UNEVEN,
    build_handmade,
    build_model,
    build_whole,
    differences,
    distribute_by_index,
    left_to_right,
    local_of,
    poison,
    random_whole,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torchtitan_ext as tte

Refusal = tuple[str, str, tuple[Any, ...]]


def refusal_of(act: Callable[[], Any]) -> Refusal | None:
    """Class, text and problems of the refusal of an act; None where it went through."""
    try:
        act()
    except tte.errors.StateRefusedError as error:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.problems) == (type(error), str(error), error.problems)
        assert isinstance(error, (RuntimeError, ValueError)) and isinstance(error, Exception)
        return type(error).__name__, str(error), error.problems
    return None


def files_in(path: Path) -> list[Path]:
    return [entry for entry in path.rglob("*") if entry.is_file()]


def the_same_on_all(answers: list[Refusal | None]) -> Refusal:
    assert all(answer == answers[0] for answer in answers), answers
    assert answers[0] is not None, "nothing was refused"
    return answers[0]


# States that no save may write. Each function gives one rank's state.


def mesh_of(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def partial_state(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    return {
        "loss": DTensor.from_local(torch.ones(3), mesh, [Partial("avg")], run_check=False),
        "fine": torch.zeros(2),
    }


def wrong_local_sizes(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    local = torch.zeros(3 if rank == 0 else 6, 2)
    return {"weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(9, 2), stride=(2, 1))}


def different_shapes(rank: int, world_size: int) -> dict[str, Any]:
    return {"weight": torch.zeros(4 + rank, 2)}


def different_dtypes(rank: int, world_size: int) -> dict[str, Any]:
    return {"weight": torch.zeros(4, dtype=torch.float32 if rank == 0 else torch.bfloat16)}


def different_kinds(rank: int, world_size: int) -> dict[str, Any]:
    return {"weight": torch.zeros(4) if rank == 0 else "weight"}


def different_objects(rank: int, world_size: int) -> dict[str, Any]:
    return {"trainer": {"step": 100 + rank, "name": "run"}}


def different_dtensor_replicas(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    return {"weight": DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=False)}


def interleaved_qkv(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "layers.0.wqkv.weight": build_handmade(INTERLEAVED_QKV, {"w": random_whole((24, 2), torch.float32, 0)})["w"]
    }


def on_meta(rank: int, world_size: int) -> dict[str, Any]:
    return {"weight": torch.zeros(3, device="meta")}


def missing_rank(rank: int, world_size: int) -> dict[str, Any]:
    """A shard that one rank of the mesh does not bring along."""
    state = {"weight": distribute_by_index(torch.arange(8.0), mesh_of(world_size), left_to_right("", (4,), Shard(0)))}
    return state if rank != 2 else {"other": torch.zeros(1)}


BAD_STATES = {
    partial_state: ("LayoutError", ["loss", "Partial", "avg", "Replicate"]),
    wrong_local_sizes: ("LayoutError", ["weight", "(9, 2)", "Shard(0)"]),
    different_shapes: ("ReplicaMismatchError", ["weight", "(4, 2)", "(5, 2)", "rank 0", "rank 1"]),
    different_dtypes: ("ReplicaMismatchError", ["weight", "torch.float32", "torch.bfloat16", "rank 0", "rank 1"]),
    different_kinds: ("ReplicaMismatchError", ["weight", "rank 0", "rank 1"]),
    different_objects: ("ReplicaMismatchError", ["trainer.step", "ranks 0 and 1", "replicas='first'"]),
    different_dtensor_replicas: ("ReplicaMismatchError", ["weight", "ranks 0 and 1"]),
    interleaved_qkv: (
        "LayoutError",
        ["layers.0.wqkv.weight", "_StridedShard(0, split_factor=3)", "layouts=", "two ways"],
    ),
    on_meta: ("LayoutError", ["weight", "meta"]),
    missing_rank: ("LayoutError", ["weight", "2"]),
}


def save_with_tte(rank: int, world_size: int, make: Callable[..., dict[str, Any]], path: Path) -> Refusal | None:
    return refusal_of(lambda: tte.save(make(rank, world_size), path))


@pytest.mark.parametrize("make", BAD_STATES, ids=lambda make: make.__name__)
def test_save_refuses(run_world, tmp_path: Path, make: Callable[..., dict[str, Any]]) -> None:
    error_class, words = BAD_STATES[make]
    name, text, problems = the_same_on_all(run_world(4, save_with_tte, make, tmp_path))
    assert name == error_class
    assert [word for word in words if word not in text] == []
    assert problems and all(problem.detail for problem in problems)
    assert files_in(tmp_path) == []


def save_with_dcp(rank: int, world_size: int, path: Path) -> tuple[str, bool]:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(partial_state(rank, world_size), checkpoint_id=path, planner=tte.SavePlanner())
    return str(caught.value), isinstance(caught.value, Exception)


def test_through_stock_the_report_is_the_last_block_and_comes_once(run_world, tmp_path: Path) -> None:
    texts = [text for text, _ in run_world(4, save_with_dcp, tmp_path)]
    assert len(set(texts)) == 1
    assert texts[0].count("save refused, nothing was changed") == 1
    report = texts[0].split("LayoutError: save refused", 1)[1]
    assert "loss" in report and "avg" in report and "Traceback" not in report
    assert files_in(tmp_path) == []


def fixed_interleaved(rank: int, world_size: int, path: Path) -> list[str]:
    order = tte.layout.ShardOrder((("axis1", 0, 3), ("axis0", 0, 1)))
    whole = random_whole((24, 2), torch.float32, 0)
    state = {"model": interleaved_qkv(rank, world_size)}
    moments = build_handmade(INTERLEAVED_QKV, {"exp_avg": whole, "exp_avg_sq": whole})
    state["optimizer"] = {"state": {"layers.0.wqkv.weight": moments}}
    tte.save(state, path, planner=tte.SavePlanner(layouts={"layers.*.wqkv.weight": order}))
    poison(state)
    tte.load(state, path, planner=tte.LoadPlanner(layouts={"layers.0.wqkv.weight": order}))
    names = ["model.layers.0.wqkv.weight"]
    names += [f"optimizer.state.layers.0.wqkv.weight.{moment}" for moment in ("exp_avg", "exp_avg_sq")]
    lines = differences(state, dict.fromkeys(names, whole), list(INTERLEAVED_QKV.steps))
    wrong = tte.layout.ShardOrder((("axis1", 1, 3), ("axis0", 0, 1)))
    refused = refusal_of(lambda: tte.save(state, path, planner=tte.SavePlanner(layouts={"*wqkv.weight": wrong})))
    assert refused is not None and refused[0] == "LayoutError" and "stated order" in refused[1]
    return lines


def test_a_stated_order_holds_for_the_optimizer_state_too(run_world, tmp_path: Path) -> None:
    assert run_world(4, fixed_interleaved, tmp_path) == [[]] * 4
    whole = {"model": {"layers.0.wqkv.weight": torch.zeros(24, 2)}}
    tte.load(whole, tmp_path)
    assert torch.equal(whole["model"]["layers.0.wqkv.weight"], random_whole((24, 2), torch.float32, 0))


# Replicas that differ.


def save_replicas(rank: int, world_size: int, kind: str, options: dict[str, Any], path: Path) -> list[str]:
    """The warnings of the save; the refusal's text in their place where there is one."""
    mesh = mesh_of(world_size)
    values = torch.full((100_000 if kind == "large" else 4,), float(rank))
    if kind in ("large", "dtensor"):
        value: Any = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    else:
        value = values if kind == "plain" else {"a": rank, "b": -rank}
    # As many keys as ranks: writing them would be spread over the ranks.
    state = {f"value_{index}": value for index in range(world_size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused = refusal_of(lambda: tte.save(state, path, planner=tte.SavePlanner(**options)))
    if refused is not None:
        return [refused[0]]
    return [str(entry.message) for entry in caught if "lowest rank" in str(entry.message)]


@pytest.mark.parametrize(
    ("kind", "options", "outcome"),
    [
        ("object", {}, "error"),
        ("object", {"replicas": "warn"}, "warning"),
        ("object", {"replicas": "first"}, "silent"),
        ("dtensor", {}, "error"),
        ("dtensor", {"replicas": "warn"}, "warning"),
        ("dtensor", {"replicas": "first"}, "silent"),
        ("plain", {}, "warning"),
        ("plain", {"replicas": "first"}, "silent"),
        ("large", {}, "silent"),
        ("large", {"hash_replicas": True}, "error"),
        ("large", {"hash_replicas": True, "replicas": "warn"}, "warning"),
    ],
)
def test_replicas_that_differ(run_world, tmp_path: Path, kind: str, options: dict[str, Any], outcome: str) -> None:
    answers = run_world(3, save_replicas, kind, options, tmp_path)
    if outcome == "error":
        assert answers == [["ReplicaMismatchError"]] * 3
        assert files_in(tmp_path) == []
        return
    # Only the coordinator warns.
    assert ["value_0" in line for line in answers[0]] == ([True] if outcome == "warning" else [])
    size = 100_000 if kind == "large" else 4
    state: dict[str, Any] = {
        f"value_{index}": {"a": -1, "b": -1} if kind == "object" else torch.full((size,), -1.0) for index in range(3)
    }
    tte.load(state, tmp_path)
    for value in state.values():
        if kind == "object":
            assert value == {"a": 0, "b": 0}, "values of several ranks were mixed"
        elif is_noticed(kind, options):
            assert torch.equal(value, torch.zeros(size)), "not the lowest rank's value"
        else:
            assert len(value.unique()) == 1, "values of several ranks were mixed"


def is_noticed(kind: str, options: dict[str, Any]) -> bool:
    """Whether it is known that the tensors differ, so that the lowest rank's must be written."""
    return kind != "large" or options.get("hash_replicas", False)


def equal_objects(rank: int, world_size: int) -> dict[str, Any]:
    """Equal values that pickle differently: by the order of dicts and by which equal values are one object."""
    shared = ["x" * 3, 1.5]
    first = {"b": {3, 1, 2}, "a": [shared, shared]}
    second = {"a": [["x" + "xx", 1.5], ["xxx", 1.5]], "b": {2, 3, 1}}
    return {"extra": (first if rank == 0 else second, float("nan"), torch.float32)}


def test_equal_objects_that_pickle_differently_are_equal(run_world, tmp_path: Path) -> None:
    assert run_world(2, save_with_tte, equal_objects, tmp_path) == [None, None]


# Loads.


def saved_model(rank: int, world_size: int, path: Path) -> None:
    model = build_model(BY_NAME["fsdp2_tp2"], UNEVEN).state_dict()
    tte.save({"model": model, "step": 3, "lr": 0.5, "half": torch.ones(3, dtype=torch.bfloat16)}, path)


@pytest.fixture(scope="module")
def checkpoint(run_world, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("refusals") / "checkpoint"
    run_world(4, saved_model, path)
    return path


def load_bad_targets(rank: int, world_size: int, path: Path) -> tuple[Refusal | None, list[str]]:
    model = build_model(BY_NAME["fsdp4"], UNEVEN, seed=1).state_dict()
    before = build_whole(UNEVEN, seed=1).state_dict()
    state: dict[str, Any] = {
        "model": dict(model),
        "step": torch.zeros(1),
        "half": torch.zeros(3, dtype=torch.float16),
        "lr": -1.0,
        "absent": -1,
    }
    state["model"]["on_meta"] = torch.empty(3, device="meta")
    state["model"]["num_batches"] = torch.empty((), dtype=torch.int64, device="meta")
    state["model"]["embed.weight"] = torch.zeros(5, 9)
    state["model"]["head.weigth"] = state["model"].pop("head.weight")
    refused = refusal_of(lambda: tte.load(state, path))
    assert state["lr"] == -1.0 and state["absent"] == -1 and state["model"]["on_meta"].is_meta
    assert state["model"]["num_batches"].is_meta
    assert not local_of(state["step"]).any() and not state["half"].any() and not state["model"]["embed.weight"].any()
    return refused, differences(model, before)


def test_load_reports_everything_at_once_and_changes_nothing(run_world, checkpoint: Path) -> None:
    answers = run_world(4, load_bad_targets, checkpoint)
    name, text, problems = the_same_on_all([refused for refused, _ in answers])
    assert [lines for _, lines in answers] == [[]] * 4
    assert name == "StateRefusedError"
    kinds = {(problem.kind, problem.fqn) for problem in problems}
    assert kinds == {
        ("missing_key", "model.head.weigth"),
        ("missing_key", "absent"),
        ("missing_key", "model.on_meta"),
        ("wrong_shape", "model.embed.weight"),
        ("wrong_type", "step"),
        ("wrong_dtype", "half"),
    }
    for words in ["Missing key in checkpoint", "Size mismatch", "Nearest: model.head.weight", "(5, 9)", "(33, 9)"]:
        assert words in text.replace("torch.Size([5, 9])", "(5, 9)").replace("torch.Size([33, 9])", "(33, 9)")


def load_on_one_rank_only(rank: int, world_size: int, path: Path) -> Refusal | None:
    state: dict[str, Any] = {"step": -1, f"absent_{rank}": -1} if rank == 2 else {"step": -1}
    refused = refusal_of(lambda: tte.load(state, path))
    assert state["step"] == -1
    return refused


def test_what_one_rank_lacks_is_refused_on_all(run_world, checkpoint: Path) -> None:
    name, text, _ = the_same_on_all(run_world(4, load_on_one_rank_only, checkpoint))
    assert name == "MissingStateError" and "absent_2" in text


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"absent": -1}, "Missing key in checkpoint"),
        ({"half": torch.zeros(4)}, "Size mismatch"),
    ],
)
def test_phrases_of_stock_survive_in_dcp_load(checkpoint: Path, target: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointException, match=words):
        dcp.load(target, checkpoint_id=checkpoint, planner=tte.LoadPlanner(), no_dist=True)


def test_missing_keys_share_a_line(tmp_path: Path) -> None:
    tte.save({"a": 1}, tmp_path)
    with pytest.raises(tte.errors.MissingStateError) as caught:
        tte.load({f"missing_{index}": 0 for index in range(25)}, tmp_path)
    assert len(caught.value.problems) == 25
    assert "state_dict: missing_0 (and 24 more: missing_1, missing_2, ...)." in str(caught.value)


CASTS = [
    (torch.bfloat16, torch.float32, "exact"),
    (torch.float32, torch.bfloat16, "allow"),
    (torch.int64, torch.float32, None),
    (torch.float32, torch.int64, None),
    (torch.complex64, torch.float32, None),
    (torch.float16, torch.bfloat16, "allow"),
    (torch.bool, torch.int64, "exact"),
    (torch.int32, torch.int64, "exact"),
    (torch.int64, torch.int32, "allow"),
]


@pytest.mark.parametrize(("source", "target", "least"), CASTS, ids=str)
def test_casts(tmp_path: Path, source: torch.dtype, target: torch.dtype, least: str | None) -> None:
    """`least` is the strictest policy under which the cast goes through."""
    values = torch.tensor([0, 1, 1, 0]).to(source)
    tte.save({"value": values}, tmp_path)
    allowed = {"exact": ["exact", "allow"], "allow": ["allow"], None: []}[least]
    if (source, target) == (torch.int64, torch.float32):
        allowed = ["allow"]
    for policy in ["forbid", "exact", "allow"]:
        state = {"value": torch.full((4,), 3).to(target)}
        refused = refusal_of(
            lambda state=state, policy=policy: tte.load(state, tmp_path, planner=tte.LoadPlanner(cast=policy))
        )
        if policy in allowed:
            assert refused is None
            assert torch.equal(state["value"], values.to(target))
        else:
            assert refused is not None and refused[0] == "ReshardError"
            assert str(source) in refused[1] and str(target) in refused[1]
            assert torch.equal(state["value"], torch.full((4,), 3).to(target))


# Entries of which each rank has its own.


def per_rank_state(rank: int, world_size: int) -> dict[str, Any]:
    return {"dataloader": {f"dp_rank_{rank}": {"position": rank}}, "layers.7": rank // world_size}


def save_per_rank(rank: int, world_size: int, path: Path) -> None:
    tte.save(per_rank_state(rank, world_size), path)


def load_per_rank(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> Refusal | None:
    state = per_rank_state(rank, world_size)
    state["dataloader"][f"dp_rank_{rank}"]["position"] = -1
    refused = refusal_of(lambda: tte.load(state, path, planner=tte.LoadPlanner(**options)))
    assert state["dataloader"][f"dp_rank_{rank}"]["position"] == (rank if refused is None else -1)
    return refused


def test_entries_of_ranks_that_are_gone(run_world, tmp_path: Path) -> None:
    run_world(4, save_per_rank, tmp_path)
    assert run_world(4, load_per_rank, tmp_path, {}) == [None] * 4
    name, text, _ = the_same_on_all(run_world(2, load_per_rank, tmp_path, {}))
    assert name == "ReshardError" and "dataloader.dp_rank_*" in text and "allow_unclaimed" in text
    allowed = {"allow_unclaimed": ["dataloader.dp_rank_*"]}
    assert run_world(2, load_per_rank, tmp_path, allowed) == [None, None]
    # A part of the checkpoint, none of the family: fine.
    tte.load({"layers.7": -1}, tmp_path)


def test_entries_of_ranks_that_are_new(run_world, tmp_path: Path) -> None:
    run_world(2, save_per_rank, tmp_path)
    name, text, _ = the_same_on_all(run_world(4, load_per_rank, tmp_path, {}))
    assert name == "MissingStateError" and "dp_rank_2" in text and "dp_rank_3" in text


# Checkpoints whose metadata lies.


def damage(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata.state_dict_metadata["weight"])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / ".tte_index").unlink()  # by which FileReader would refuse it at once


def save_rows(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    tte.save(
        {"weight": distribute_by_index(torch.arange(12.0), mesh, left_to_right("", (world_size,), Shard(0)))}, path
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry.chunks.pop(1), "gap"),
        (lambda entry: entry.chunks.append(entry.chunks[0]), "overlap"),
    ],
    ids=["gap", "overlap"],
)
def test_metadata_that_does_not_cover_the_tensor(run_world, tmp_path: Path, change: Any, words: str) -> None:
    run_world(3, save_rows, tmp_path)
    state = {"weight": torch.full((12,), -1.0)}
    tte.load(state, tmp_path)
    assert torch.equal(state["weight"], torch.arange(12.0))
    damage(tmp_path, change)
    state = {"weight": torch.full((12,), -1.0)}
    with pytest.raises(tte.errors.ReshardError, match=words):
        tte.load(state, tmp_path)
    assert torch.equal(state["weight"], torch.full((12,), -1.0))


def test_one_rank_saves_are_validated_too(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with pytest.raises(tte.errors.LayoutError, match="meta"):
        tte.save({"weight": torch.zeros(3, device="meta")}, tmp_path)
    assert files_in(tmp_path) == []


# Structure that stock loses.


def structured(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    row = left_to_right("", (world_size,), Shard(0))
    return {
        "int_keys": {0: torch.arange(3), 1: {2: "two"}},
        "tuple": (distribute_by_index(torch.arange(5.0), mesh, row), 7),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "no_tensors": (1, "two"),
    }


def round_trip_structure(rank: int, world_size: int, path: Path) -> bool:
    state = structured(rank, world_size)
    tte.save(state, path)
    fresh = structured(rank, world_size)
    poison(fresh)
    fresh["int_keys"][1][2] = ""
    fresh["no_tensors"] = (0, "")
    tte.load(fresh, path)
    assert list(fresh["int_keys"]) == [0, 1] and fresh["int_keys"][1] == {2: "two"}
    assert torch.equal(fresh["int_keys"][0], torch.arange(3))
    assert isinstance(fresh["tuple"], tuple) and fresh["tuple"][1] == 7
    assert torch.equal(fresh["tuple"][0].to_local(), state["tuple"][0].to_local())
    assert torch.equal(fresh["scalar"], torch.tensor(2.5)) and fresh["empty"].shape == (0, 3)
    return fresh["no_tensors"] == (1, "two")


def test_structure_survives(run_world, tmp_path: Path) -> None:
    assert run_world(3, round_trip_structure, tmp_path) == [True] * 3
