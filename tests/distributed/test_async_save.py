"""`dcp.async_save` with our planner, in its thread and its process form, and `tte.async_save`."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warm_processes
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
from states import save_of_run
from torch.distributed.checkpoint import DefaultSavePlanner, _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager


def save_and_change(start: Callable[[dict[str, Any]], Any], state: dict[str, Any]) -> None:
    """Starts a save, spoils the state at once, as the next step of training does, and waits for the save."""
    response = start(state)
    poison(state)
    future = getattr(response, "upload_completion", response)
    future.result()


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
    run_world(4, function, BY_NAME["fsdp2_tp2"], tmp_path)
    state = whole_state()
    poison(state)
    dcp.load(state, checkpoint_id=tmp_path, planner=tte.LoadPlanner(), no_dist=True)
    assert differences(state, training_truth(UNEVEN)) == []


def save_steps_with_one_stager(rank: int, world_size: int, layout: HandMade, folder: Path) -> list[int]:
    """The planner is kept too, and so is an error: neither may hold copies for which the next save waits."""
    truth = handmade_truth()
    stager, planner, kept = CpuStager(), tte.SavePlanner(), []
    for step in range(3):
        refused = tte.async_save({"rank": rank, "w": torch.ones(9)}, folder / "refused", stager=stager)
        kept.append(refused.exception())
        state = {"model": build_handmade(layout, truth), "step": step}
        save_and_change(lambda s, p=folder / str(step): tte.async_save(s, p, stager=stager, planner=planner), state)
        state = {"model": build_handmade(layout, truth), "step": step}
        save_and_change(
            lambda s, p=folder / f"dcp-{step}": dcp.async_save(
                s, checkpoint_id=p, async_stager=stager, planner=planner
            ),
            state,
        )
    return [type(error).__name__ == "ReplicaMismatchError" for error in kept]


def test_one_stager_and_one_planner_for_all_saves(run_world, tmp_path: Path) -> None:
    truth = handmade_truth()
    assert run_world(2, save_steps_with_one_stager, HANDMADE_BY_NAME["strided_1d"], tmp_path) == [[True] * 3] * 2
    for step in range(3):
        for path in (tmp_path / str(step), tmp_path / f"dcp-{step}"):
            state = {"model": {name: torch.empty_like(whole) for name, whole in truth.items()}, "step": -1}
            poison(state)
            dcp.load(state, checkpoint_id=path, planner=tte.LoadPlanner(), no_dist=True)
            assert differences(state["model"], truth) == [] and state["step"] == step


class NoCopy:
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise RuntimeError("no copy")


def save_beside_what_is_kept(rank: int, world_size: int, folder: Path) -> None:
    """A planner of a rank that writes nothing, and the error of a rank whose staging did not fail."""
    stager, planner = CpuStager(), tte.SavePlanner()
    state: dict[str, Any] = {"w": torch.ones(9)}  # one rank writes all
    for step in range(2):
        dcp.async_save(state, checkpoint_id=folder / str(step), async_stager=stager, planner=planner).result()
    failing = {**state, "odd": NoCopy()} if rank == 1 else state
    with pytest.raises(tte.errors.CheckpointFailedError, match="rank 1: RuntimeError: no copy") as kept:
        tte.async_save(failing, folder / "failed", stager=stager)
    tte.async_save(state, folder / "last", stager=stager).result()
    del kept


@pytest.mark.timeout(120)
def test_what_is_kept_after_a_save_holds_no_copies(run_world, tmp_path: Path) -> None:
    run_world(2, save_beside_what_is_kept, tmp_path)


class PlannerWithoutState(DefaultSavePlanner):
    """Drops its state dict itself when all is planned and resolved."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        self.state_dict = None  # type: ignore[assignment]
        return value


def test_a_planner_may_drop_its_state_dict(tmp_path: Path) -> None:
    assert tte.async_save({"w": torch.ones(9)}, tmp_path, planner=PlannerWithoutState()).result().num_bytes > 0


def save_without_a_thread(rank: int, world_size: int, path: Path) -> str:
    no_thread = mock.patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError("can't start new thread"))
    with no_thread if rank == 1 else nullcontext(), pytest.raises(tte.errors.CheckpointFailedError) as caught:
        tte.async_save({"w": torch.ones(3)}, path, timeout_seconds=60)
    assert tte.async_save({"w": torch.ones(3)}, path, timeout_seconds=60).result().num_bytes > 0
    return str(caught.value)


def test_a_rank_that_can_start_no_thread_tells_all(run_world, tmp_path: Path) -> None:
    text, other = run_world(2, save_without_a_thread, tmp_path / "step")
    assert text == other and "1 rank(s): rank 1: RuntimeError: can't start new thread; raise the number of" in text
    assert "in phase stage" in text


def test_a_caller_interrupted_when_the_thread_has_the_state_saves_all_of_it(tmp_path: Path) -> None:
    submit = ThreadPoolExecutor.submit

    def submit_and_interrupt(pool: ThreadPoolExecutor, work: Any, *arguments: Any) -> Any:
        future = submit(pool, work, *arguments)
        if arguments:
            raise KeyboardInterrupt
        return future

    with mock.patch.object(ThreadPoolExecutor, "submit", submit_and_interrupt), pytest.raises(KeyboardInterrupt):
        tte.async_save({"w": torch.ones(3), "n": 5}, tmp_path / "step")
    for thread in threading.enumerate():
        if thread.name.startswith("torchtitan_ext.async_save"):
            thread.join(60)
    tte.load(state := {"w": torch.zeros(3), "n": 0}, tmp_path / "step")
    assert state["n"] == 5 and state["w"].tolist() == [1, 1, 1]


def async_save_in_process(rank: int, world_size: int, layout: HandMade, folder: Path) -> None:
    truth = handmade_truth()
    try:
        # The process lives on between saves and gets a fresh pickle of the planner each time.
        for step in range(2):
            save_and_change(
                lambda state, path=folder / str(step): dcp.async_save(
                    state,
                    checkpoint_id=path,
                    planner=tte.SavePlanner(),
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


@pytest.mark.sampled(0.5, "child processes")
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
    error = future.exception()
    return type(error).__name__, str(error)


def test_a_refusal_reaches_the_future(run_world, tmp_path: Path) -> None:
    first, second = run_world(2, refused_async_save, tmp_path / "refused")
    assert first == second
    assert first[0] == "ReplicaMismatchError"
    assert "rank" in first[1]


class PortTakenError(Exception):
    """DCP looks for a free port, and its process listens there later: another one may have taken it by then."""


def refused_in_process(rank: int, world_size: int, path: Path) -> tuple[str, list[str]]:
    """The error crosses a process border: it must pickle with its fields."""
    try:
        future = dcp.async_save(
            {"rank": rank},
            checkpoint_id=path,
            planner=tte.SavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        error = future.exception()
    finally:
        end_process()
    if "failed to listen" in str(error):
        raise PortTakenError
    assert isinstance(error, CheckpointException), error
    causes = [cause for cause, _ in error.failures.values()]
    assert all(isinstance(cause, tte.errors.ReplicaMismatchError) for cause in causes)
    return str(error), [problem.fqn for cause in causes for problem in cause.problems]


@pytest.mark.sampled(0.5, "child processes")
def test_a_refusal_comes_back_from_the_process(run_world, tmp_path: Path) -> None:
    try:
        answers = run_world(2, refused_in_process, tmp_path)
    except PortTakenError:
        answers = run_world(2, refused_in_process, tmp_path)
    for text, fqns in answers:
        assert fqns == ["rank"]
        assert "Replicas differ" in text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def lose_errors(rank: int, world_size: int, folder: Path) -> list[str]:
    """What the operation after a save that failed raises or warns of, the same on both ranks."""
    said: list[str] = []
    loaded = {"w": torch.zeros(9)}
    tte.save({"w": torch.ones(9)}, folder / "good")
    following: list[Callable[[], Any]] = [
        lambda: tte.save({"w": torch.ones(9)}, folder / "next"),
        lambda: tte.async_save({"w": torch.ones(9)}, folder / "next").result(60),
        lambda: tte.load(loaded, folder / "good"),
        lambda: tte.load(loaded, folder, step=1),
    ]
    tte.save({"w": torch.ones(9)}, folder / "step-1")
    for number, operation in enumerate(following):
        for how in ("nobody", "rank 1", "waits", "warns"):
            on_error = "warn" if how == "warns" else "raise"
            future = save_of_run({"value": rank}, folder / "bad", is_async=True, on_error=on_error)
            if how == "rank 1" and rank == 1:
                assert type(future.exception(60)).__name__ == "ReplicaMismatchError"
            if how == "waits":
                wait([future], 60)
            del future
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    operation()
                except tte.errors.ReplicaMismatchError:
                    said.append(f"{number} {how}: raised")
                operation()  # once
            texts = [str(one.message) for one in caught if "nobody asked" in str(one.message)]
            assert len(texts) == (rank == 0 and how == "warns")
            assert all("value" in text for text in texts)
    return said


def test_an_error_that_nobody_asks_for_is_raised_by_the_next_operation(run_world, tmp_path: Path) -> None:
    expected = [f"{number} {how}: raised" for number in range(4) for how in ("nobody", "waits")]
    assert run_world(2, lose_errors, tmp_path) == [expected, expected]


LOSES_AN_ERROR = """
import sys, torch, torchtitan_ext as tte
path, asks = sys.argv[1], sys.argv[2]
future = tte.async_save({"w": torch.ones(3)}, path + "/file/step-1")
if asks == "asks":
    assert "file" in str(future.exception())
"""


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("asks", ["asks", "drops"])
def test_an_error_that_nobody_asks_for_is_printed_at_the_exit(tmp_path: Path, asks: str) -> None:
    (tmp_path / "file").write_text("no directory")
    done = warm_processes.run(["-c", LOSES_AN_ERROR, tmp_path, asks], capture_output=True, check=True)
    text = "torchtitan_ext: an async_save failed, and nobody asked its future: save failed on 1 rank(s): rank 0: "
    assert (text in done.stderr) == (asks == "drops")
