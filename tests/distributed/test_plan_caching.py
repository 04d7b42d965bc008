"""`SavePlanner(enable_plan_caching=True)` over several saves of one world: what is unchanged is not sent again."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    HANDMADE_BY_NAME,
    UNEVEN,
    build_handmade,
    build_model,
    build_optimizer,
    build_whole,
    differences,
    handmade_truth,
    leaves,
    random_whole,
    take_steps,
    training_state,
)
from torch.distributed.checkpoint import FileSystemReader

import torchtitan_ext as tte


class WatchedPlanner(tte.SavePlanner):
    """Notes whether each local plan was sent in full."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.was_usable: bool | None = None

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.was_usable = plan.usable
        return plan


def save_watched(state: dict[str, Any], path: Path) -> bool | None:
    planner = WatchedPlanner()
    dcp.save(state, checkpoint_id=path, planner=planner)
    return planner.was_usable


def train_and_save(rank: int, world_size: int, folder: Path) -> list[bool | None]:
    model = build_model(BY_NAME["fsdp4_tp2"], UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    sent = []
    for step in range(3):
        take_steps(model, optimizer, num_steps=1)
        state = training_state(model, optimizer)
        sent.append(save_watched({**state, "step": step}, folder / str(step)))
    # Another structure, and the first one again.
    sent.append(save_watched({"model": model.state_dict()}, folder / "model"))
    sent.append(save_watched({**training_state(model, optimizer), "step": 3}, folder / "3"))
    return sent


def test_every_step_has_its_own_values(run_world, tmp_path: Path) -> None:
    for sent in run_world(8, train_and_save, tmp_path):
        assert sent == [True, False, False, True, False]
    model = build_whole(UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    for step in range(4):
        if step < 3:
            take_steps(model, optimizer, num_steps=1)
        truth = {**training_state(model, optimizer), "step": step}
        state = build_whole(UNEVEN, seed=1)
        fresh = {**training_state(state, build_optimizer(state, lr=0.5)), "step": -1}
        tte.load(fresh, tmp_path / str(step))
        assert differences(fresh, dict(leaves(truth))) == []


def change_dtypes(rank: int, world_size: int, folder: Path) -> list[bool | None]:
    layout = HANDMADE_BY_NAME["strided_1d"]
    sent = []
    for dtype in [torch.float32, torch.bfloat16, torch.float32]:
        truth = {"weight": random_whole((17, 3), dtype, 0)}
        sent.append(save_watched(dict(build_handmade(layout, truth)), folder / f"{len(sent)}"))
    return sent


def test_a_change_of_dtype_reaches_the_metadata(run_world, tmp_path: Path) -> None:
    assert run_world(2, change_dtypes, tmp_path) == [[True, True, False]] * 2
    for index, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32]):
        metadata = FileSystemReader(tmp_path / str(index)).read_metadata()
        assert metadata.state_dict_metadata["weight"].properties.dtype == dtype
        state = {"weight": torch.zeros(17, 3, dtype=dtype)}
        tte.load(state, tmp_path / str(index))
        assert differences(state, {"weight": random_whole((17, 3), dtype, 0)}) == []


def change_on_one_rank(rank: int, world_size: int, folder: Path) -> list[bool | None]:
    """Rank 1 gets a key more, then loses it again."""
    layout = HANDMADE_BY_NAME["shard0_strided"]
    sent = []
    for step in range(3):
        state: dict[str, Any] = dict(build_handmade(layout, handmade_truth()))
        if rank == 1 and step == 1:
            state["extra"] = torch.arange(3)
        sent.append(save_watched(state, folder / str(step)))
    return sent


def test_one_rank_alone_may_change(run_world, tmp_path: Path) -> None:
    answers = run_world(4, change_on_one_rank, tmp_path)
    assert answers[0] == [True, False, False] and answers[1] == [True, True, False]
    for step in range(3):
        metadata = FileSystemReader(tmp_path / str(step)).read_metadata()
        assert ("extra" in metadata.state_dict_metadata) == (step == 1)
        state: dict[str, Any] = {name: torch.zeros_like(whole) for name, whole in handmade_truth().items()}
        truth: dict[str, Any] = dict(handmade_truth())
        if step == 1:
            state["extra"], truth["extra"] = torch.zeros(3, dtype=torch.int64), torch.arange(3)
        tte.load(state, tmp_path / str(step))
        assert differences(state, truth) == []


def differ_at_the_second_save(rank: int, world_size: int, folder: Path) -> list[str]:
    outcomes = []
    for step in range(2):
        try:
            state = {"trainer": {"step": step * rank}}
            tte.save(state, folder / str(step), planner=tte.SavePlanner(enable_plan_caching=True))
            outcomes.append("saved")
        except tte.errors.ReplicaMismatchError:
            outcomes.append("refused")
    return outcomes


def test_replicas_are_compared_at_every_save(run_world, tmp_path: Path) -> None:
    assert run_world(3, differ_at_the_second_save, tmp_path) == [["saved", "refused"]] * 3
