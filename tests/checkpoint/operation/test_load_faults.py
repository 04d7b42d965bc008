"""What goes wrong on one rank in a load by a policy: killed, failing, called with other arguments; damaged files."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from signals import die
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy, Resharded, Source, World
from torchtitan_ext.errors import (
    CheckpointFailedError,
    LostRankError,
    ReplicaMismatchError,
    StateRefusedError,
    TorchtitanExtError,
)
from torchtitan_ext.ranks import watch

FAILING_RANK = 1


class Places:
    """Of each rank one place; a new rank takes that of rank 0. Calls a function where a load gets to it."""

    def __init__(self, rank: int, at: Callable[[str], None] = lambda phase: None) -> None:
        self.rank, self.at, self.place = rank, at, 10 + rank

    def state_dict(self) -> dict[str, Any]:
        return {f"rank_{self.rank}": (self.place,)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at("apply")
        ((self.place,),) = state_dict.values()

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        self.at("prepare")
        return Resharded({"place": saved.get(f"rank_{self.rank}", saved["rank_0"])}, "dealt")

    def reset(self) -> None:
        self.at("reset")
        self.place = -1


class WatchedPlanner(tte.LoadPlanner):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.at = at

    def create_local_plan(self) -> Any:
        self.at("plan")
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.at("read")
        return super().resolve_tensor(read_item)


def job(rank: int, at: Callable[[str], None] = lambda phase: None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(torch.arange(36.0).view(9, 4), mesh, [Shard(0)]),
        "train_state": {"step": 7},
        "places": Places(rank, at),
    }


def save_job(rank: int, world_size: int, path: Path) -> None:
    tte.save(job(rank), path)


@pytest.fixture(scope="module")
def checkpoint(run_world: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load_faults") / "whole"
    run_world(2, save_job, path)
    return path


def lose_a_rank(rank: int, world_size: int, path: Path, folder: Path, when: str) -> None:
    watch._ANSWER_SECONDS = 2.0

    def at(phase: str) -> None:
        if phase == when and rank == FAILING_RANK:
            die()

    with pytest.raises(LostRankError) as caught:
        tte.load(job(rank, at), path, policy=ElasticPolicy(), planner=WatchedPlanner(at))
    (folder / f"error{rank}").write_text(str(caught.value))


PHASES = {
    "prepare": "components were asked for their part; nothing was changed",
    "plan": "the load was planned; nothing was changed",
    "read": "tensors were read; these may be part-written: w, train_state",
    "apply": "components took their state; undefined are w, train_state, places",
}


@pytest.mark.nightly("lost")
@pytest.mark.parametrize("when", PHASES)
def test_a_rank_that_is_killed_is_named_with_the_phase(
    run_world: Callable[..., Any], checkpoint: Path, tmp_path: Path, when: str
) -> None:
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, lose_a_rank, checkpoint, tmp_path, when)
    for rank in (0, 2):
        text = (tmp_path / f"error{rank}").read_text()
        step = "take" if when == "apply" else when
        expected = (
            f"load failed in phase {step} of {checkpoint} while {PHASES[when]}; rank(s) {FAILING_RANK} did not answer"
        )
        assert text.startswith(expected)


def fail(rank: int, world_size: int, path: Path, when: str) -> tuple[str, tuple[str, ...], float, Any]:
    def at(phase: str) -> None:
        if phase == when and rank == FAILING_RANK:
            raise RuntimeError("boom")

    state = job(rank, at)
    state["w"].to_local().zero_()
    policy = ElasticPolicy({"places": "reset"} if when == "reset" else {})
    with pytest.raises(TorchtitanExtError) as caught:
        tte.load(state, path, policy=policy, planner=WatchedPlanner(at))
    return str(caught.value), getattr(caught.value, "undefined", ()), float(state["w"].to_local().sum()), None


@pytest.mark.parametrize(
    ("when", "undefined"),
    [
        ("prepare", ()),
        ("plan", ()),
        ("read", ("w", "train_state")),
        ("reset", ("w", "train_state", "places")),
        ("apply", ("w", "train_state", "places")),
    ],
)
def test_a_failure_on_one_rank_is_the_same_error_on_all(
    run_world: Callable[..., Any], checkpoint: Path, when: str, undefined: tuple[str, ...]
) -> None:
    answers = run_world(3, fail, checkpoint, when)
    assert len({answer[:2] for answer in answers}) == 1
    text, named, *_ = answers[0]
    assert "boom" in text and named == undefined
    if not undefined:
        assert [answer[2] for answer in answers] == [0.0] * 3, "nothing was changed"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "cut metadata": lambda path: os.truncate(path / ".metadata", 200),
    "no data": lambda path: (path / "__1_0.distcp").unlink(),
    "cut data": lambda path: os.truncate(path / "__0_0.distcp", 300),
    "empty data": lambda path: os.truncate(path / "__0_0.distcp", 0),
}


def load_damaged(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(TorchtitanExtError) as caught:
        tte.load(job(rank), path, policy=ElasticPolicy())
    return str(caught.value)


def test_lost_and_cut_files_are_one_error_on_all_ranks(run_world: Callable[..., Any], checkpoint: Path) -> None:
    for name, damage in DAMAGE.items():
        damaged = checkpoint.with_name(name)
        shutil.copytree(checkpoint, damaged)
        damage(damaged)
        texts = run_world(2, load_damaged, damaged)
        assert texts[0] == texts[1] and texts[0].startswith("load"), name


def cut_values(path: Path) -> None:
    """Makes the place of a rank no value any more; stock's files have no checksums that would tell."""
    data = path / "__0_0.distcp"
    assert b"K\n\x85" in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(b"K\n\x85", b"\xff\xff\xff"))


@pytest.mark.parametrize("damage", [cut_values, lambda path: os.truncate(path / "__0_0.distcp", 300)])
def test_damage_is_no_reason_to_start_a_component_anew(damage: Callable[[Path], object], tmp_path: Path) -> None:
    dcp.save({"places": Places(0), "w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    damage(tmp_path)
    with pytest.raises(TorchtitanExtError) as caught:
        tte.load({"places": Places(0), "w": torch.ones(3)}, tmp_path, policy=ElasticPolicy(), no_dist=True)
    assert "reset" not in str(caught.value) and not isinstance(caught.value, StateRefusedError)


def other_arguments(rank: int, world_size: int, path: Path) -> list[str]:
    texts = []
    policies = [ElasticPolicy({"w": "omit"} if rank == FAILING_RANK else {}), ElasticPolicy()]
    sources = [Source(path), Source(path, exclude=["places"] if rank == FAILING_RANK else [])]
    for policy, source in zip(policies, sources, strict=True):
        with pytest.raises(ReplicaMismatchError) as caught:
            tte.load(job(rank), source, policy=policy)
        texts.append(str(caught.value).replace(str(path), "PATH"))
    # The planner alone tells it too.
    named = "policy: is .* on ranks 0, 2, .* on rank 1; pass the same policy"
    with pytest.raises(BaseException, match=named) as wrapped:
        dcp.load({"w": torch.zeros(9, 4)}, checkpoint_id=path, planner=tte.LoadPlanner(policy=policies[0]))
    assert isinstance(wrapped.value, dcp.CheckpointException)
    return texts


def test_ranks_must_load_by_the_same_policy_and_source(run_world: Callable[..., Any], checkpoint: Path) -> None:
    (policy, source), *others = run_world(3, other_arguments, checkpoint)
    assert all(other == [policy, source] for other in others)
    assert "policy: is ElasticPolicy(), Source(" in policy
    assert " on ranks 0, 2, ElasticPolicy({'w': 'omit'}), Source(" in policy and " on rank 1; pass the same" in policy
    assert "; pass the same policy and Source on every rank" in source


def save_alone(rank: int, world_size: int, path: Path) -> None:
    dcp.save(job(rank), checkpoint_id=path, planner=tte.SavePlanner(), use_collectives=False)


def load_alone(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(TorchtitanExtError) as caught:
        tte.load(job(rank), path, policy=ElasticPolicy())
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 3])
def test_metadata_of_each_rank_for_itself(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    run_world(2, save_alone, tmp_path)
    texts = run_world(world_size, load_alone, tmp_path)
    assert len(set(texts)) == 1
    assert "each rank has metadata of its own part alone (use_collectives=False); load it without a policy" in texts[0]


def undefined_after(rank: int, world_size: int, path: Path, what: str) -> tuple[tuple[str, ...], float]:
    class Failing(tte.LoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            if what == "values":
                raise OSError("bad sector")
            super().load_bytes(read_item, value)

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            if what == "tensors":
                raise OSError("bad sector")
            return super().resolve_tensor(read_item)

    state = job(rank)
    state["w"].to_local().zero_()
    with pytest.raises(CheckpointFailedError) as caught:
        tte.load(state, Source(path, include=["w", "train_state"]), planner=Failing())
    return caught.value.undefined, float(state["w"].to_local().sum())


def test_a_value_that_cannot_be_read_changes_nothing(run_world: Callable[..., Any], checkpoint: Path) -> None:
    assert run_world(2, undefined_after, checkpoint, "values") == [((), 0.0)] * 2


def test_a_tensor_that_cannot_be_read_leaves_all_undefined(run_world: Callable[..., Any], checkpoint: Path) -> None:
    answers = run_world(2, undefined_after, checkpoint, "tensors")
    assert [undefined for undefined, _ in answers] == [("w", "train_state")] * 2
