"""Runs at URLs: stock's files through fsspec, their steps found by its listings, and what is refused there by name."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Done, call
from states import save_of_run, step_of_run

import torchtitan_ext as tte
from torchtitan_ext.cli.output import FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.errors import AbsentRunError, NoCheckpointError, StateRefusedError, WrongValueError
from torchtitan_ext.storage.runs.remote_steps import remote_steps


def train(rank: int, world_size: int, run: str, num_steps: int) -> list[int]:
    """The tutorial's loop: goes on from the latest step, saves each."""
    state: dict[str, Any] = {"weight": torch.zeros(3), "step": 0}
    if tte.latest(run) is not None:
        tte.load(state, run, step="latest")
    for step in range(state["step"] + 1, state["step"] + 1 + num_steps):
        state = {"weight": state["weight"] + step, "step": step}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = tte.save(state, f"{run}/step-{step}")
        assert result.path == f"{run}/step-{step}"
    return [state["step"], int(state["weight"][0])]


def test_a_restart_goes_on(run_world: Any, tmp_path: Path) -> None:
    run = f"file://{tmp_path}/run"
    assert run_world(2, train, run, 2) == [[2, 3]] * 2
    assert run_world(1, train, run, 2) == [[4, 10]]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"step-{step}" for step in (1, 2, 3, 4)]
    assert tte.latest(run) == f"{run}/step-4" and tte.latest(f"{run}/") == f"{run}/step-4"
    state = {"weight": torch.zeros(3), "step": 0}
    tte.load(state, run, step=2, no_dist=True)
    assert state["step"] == 2 and state["weight"].tolist() == [3.0] * 3


def save(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tte.save({"step": int(path.rpartition("-")[2])}, path, no_dist=True)


def test_only_finished_steps_count(tmp_path: Path) -> None:
    run = "memory://urls/run"
    assert tte.latest(run) is None
    for step in (1, 2):
        save(f"{run}/step-{step}")
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/urls/run/step-3/__0_0.distcp", b"")
    files.pipe("/urls/run/step-9", b"a file")
    steps = remote_steps(run)
    assert steps.finished == {1: f"{run}/step-1", 2: f"{run}/step-2"} and list(steps.unfinished) == [3]
    assert tte.latest(run) == f"{run}/step-2"
    state = {"step": 0}
    tte.load(state, run, step="latest", no_dist=True)
    assert state == {"step": 2}
    with pytest.raises(NoCheckpointError) as told:
        tte.load(state, run, step=3, no_dist=True)
    assert str(told.value) == (
        f"load: {run} has no finished checkpoint of step 3: it has steps 1, 2; not finished are 3"
    )
    with pytest.raises(NoCheckpointError, match="memory://urls/empty has no finished checkpoint: it has none"):
        tte.load(state, "memory://urls/empty", step="latest", no_dist=True)


def test_other_names_of_steps() -> None:
    run = "memory://urls/named"
    for step in (1, 12):
        save(f"{run}/checkpoint-{step}")
    assert tte.latest(run) == f"{run}/checkpoint-12"
    save(f"{run}/ckpt-20")
    assert tte.latest(run, step_pattern="ckpt-{step}") == f"{run}/ckpt-20"
    state = {"step": 0}
    tte.load(state, run, step=20, step_pattern="ckpt-{step}", no_dist=True)
    assert state == {"step": 20}


def test_steps_in_a_fallback(tmp_path: Path) -> None:
    run, away = "memory://urls/broken", "memory://urls/absent"
    save(f"{run}/step-1")
    from torchtitan_ext.storage.commit.steps import folders_in_fallback

    for place in (run, away):
        tte.save({"step": 2}, Path(folders_in_fallback(place, tmp_path)[0], "step-2"), no_dist=True)
    state = {"step": 0}
    tte.load(state, step_of_run(run, "latest", tmp_path), no_dist=True)
    assert state == {"step": 2}
    with pytest.raises(AbsentRunError):
        step_of_run(away, "latest", tmp_path)


def test_a_save_warns_once_for_a_run() -> None:
    with pytest.warns(UserWarning, match="memory://urls/warned/step-1: at this URL .* no commit.* no checksums"):
        tte.save({"step": 1}, "memory://urls/warned/step-1", no_dist=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "memory://")  # stock has words of its own, by version
        tte.save({"step": 2}, "memory://urls/warned/step-2", no_dist=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": 2}, "got keep=2 and 'memory://urls/refused/step-1', expected a directory"),
    ],
)
def test_what_cannot_be_there_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(WrongValueError, match=told):
        save_of_run({"step": 1}, "memory://urls/refused/step-1", no_dist=True, **options)
    with pytest.raises(WrongValueError, match=told):
        save_of_run({"step": 1}, "memory://urls/refused/step-1", is_async=True, **options)
    assert tte.latest("memory://urls/refused") is None


def test_the_last_good_step_is_one_of_a_directory() -> None:
    with pytest.raises(WrongValueError, match="step='last-good' and 'memory://urls/run', expected a directory"):
        tte.load({"step": 0}, "memory://urls/run", step="last-good", no_dist=True)
    with pytest.raises(WrongValueError, match="nowhere://bucket/run cannot be listed: .*nowhere"):
        tte.latest("nowhere://bucket/run")


def test_messages_name_the_url() -> None:
    save("memory://urls/named/step-1")
    with pytest.raises(StateRefusedError) as told:
        tte.load({"stepp": 0}, "memory://urls/named/step-1", no_dist=True)
    assert "memory:/urls" not in str(told.value)


def test_commands(tmp_path: Path) -> None:
    run = f"file://{tmp_path}"
    assert call("latest", run) == Done(UNREADABLE, "", f"torchtitan-ext: {run} has no finished step\n")
    save(f"{run}/step-5")
    assert call("latest", run) == Done(FINE, f"{run}/step-5\n", "")
    for name, *others in (["inspect"], ["ls"], ["verify"], ["gc"], ["diff", str(tmp_path)], ["plan", "--mesh", "dp=2"]):
        done = call(name, *others, f"{run}/step-5")
        assert done.code == WRONG_USAGE
        assert f"{name}: got {run}/step-5, expected a directory" in done.err
