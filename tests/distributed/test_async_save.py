"""`dcp.async_save` with our planner, in its thread and its process form, and `tte.async_save`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    HANDMADE_BY_NAME,
    UNEVEN,
    HandMade,
    Layout,
    build_handmade,
    build_model,
    build_whole,
    differences,
    handmade_truth,
    poison,
    trained,
    training_truth,
)
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchtitan_ext as tte


def save_and_change(start: Callable[[dict[str, Any]], Any], state: dict[str, Any]) -> None:
    """Starts a save, spoils the state at once, as the next step of training does, and waits for the save."""
    response = start(state)
    poison(state)
    future = getattr(response, "upload_completion", response)
    future.result(timeout=120)


def async_save_trained(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    def start(state: dict[str, Any]) -> Any:
        return dcp.async_save(state, checkpoint_id=path, planner=tte.SavePlanner())

    save_and_change(start, trained(build_model(layout, UNEVEN)))


def our_async_save_trained(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    save_and_change(lambda state: tte.async_save(state, path), trained(build_model(layout, UNEVEN)))


def whole_state() -> dict[str, Any]:
    return trained(build_whole(UNEVEN, seed=1))


@pytest.mark.parametrize("function", [async_save_trained, our_async_save_trained])
def test_in_a_thread(run_world, tmp_path: Path, function: Callable[..., None]) -> None:
    run_world(8, function, BY_NAME["fsdp4_tp2"], tmp_path)
    state = whole_state()
    poison(state)
    dcp.load(state, checkpoint_id=tmp_path, planner=tte.LoadPlanner(), no_dist=True)
    assert differences(state, training_truth(UNEVEN)) == []


def async_save_in_process(rank: int, world_size: int, layout: HandMade, folder: Path) -> None:
    truth = handmade_truth()
    try:
        # The process lives on between saves and gets a fresh pickle of the planner each time.
        for step in range(2):
            save_and_change(
                lambda state, path=folder / str(step): dcp.async_save(
                    state,
                    checkpoint_id=path,
                    planner=tte.SavePlanner(enable_plan_caching=True),
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                ),
                {"model": build_handmade(layout, truth), "step": step},
            )
    finally:
        end_process()


def end_process() -> None:
    """Ends the process that DCP keeps for the next save: it belongs to this world."""
    dist.barrier()
    kept = _async_process_executor._CHECKPOINT_PROCESS
    _async_process_executor._CHECKPOINT_PROCESS = None
    if kept is not None:
        kept._save_process.kill()


def test_in_a_process(run_world, tmp_path: Path) -> None:
    truth = handmade_truth()
    run_world(2, async_save_in_process, HANDMADE_BY_NAME["strided_1d"], tmp_path)
    for step in range(2):
        model = {name: torch.empty_like(whole) for name, whole in truth.items()}
        state = {"model": model, "step": -1}
        poison(state)
        dcp.load(state, checkpoint_id=tmp_path / str(step), planner=tte.LoadPlanner(), no_dist=True)
        assert differences(model, truth) == []
        assert state["step"] == step


def refused_async_save(rank: int, world_size: int, path: Path) -> tuple[str, str]:
    future = tte.async_save({"rank": rank}, path)
    error = future.exception(timeout=60)
    return type(error).__name__, str(error)


def test_a_refusal_reaches_the_future(run_world, tmp_path: Path) -> None:
    first, second = run_world(2, refused_async_save, tmp_path / "refused")
    assert first == second
    assert first[0] == "ReplicaMismatchError"
    assert "rank" in first[1]


def refused_in_process(rank: int, world_size: int, path: Path) -> tuple[str, list[str]]:
    """The error crosses a process border: it must pickle with its fields."""
    try:
        future = dcp.async_save(
            {"rank": rank},
            checkpoint_id=path,
            planner=tte.SavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        error = future.exception(timeout=120)
    finally:
        end_process()
    assert isinstance(error, CheckpointException)
    causes = [cause for cause, _ in error.failures.values()]
    assert all(isinstance(cause, tte.errors.ReplicaMismatchError) for cause in causes)
    return str(error), [problem.fqn for cause in causes for problem in cause.problems]


def test_a_refusal_comes_back_from_the_process(run_world, tmp_path: Path) -> None:
    for text, fqns in run_world(2, refused_in_process, tmp_path):
        assert fqns == ["rank"]
        assert "Replicas differ" in text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
