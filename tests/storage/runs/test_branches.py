"""A run that is set back: what becomes of the steps above, which step is the latest, and which ones stay."""

import errno
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import call
from signals import die
from states import blank, differences, save, save_of_run, step_of_run

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint import SaveResult
from torchtitan_ext.errors import NoCheckpointError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.commit import branch
from torchtitan_ext.storage.commit.steps import find_steps, folders_in_fallback

NEWER = "the run goes on with step 11, below its step\\(s\\) 20, 30: these are abandoned"


def state_of(step: int, mark: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((300, 20), step + mark), "step": step}


def save_step(run: Path, step: int, mark: float = 0.0, **options: Any) -> SaveResult:
    return save_of_run(state_of(step, mark), run / f"step-{step}", no_dist=True, **options)


def loaded(run: Path, step: Any = None, mark: float = 0.0, fallback: Path | None = None) -> int:
    state = blank(state_of(0))
    if fallback is None:
        tte.load(state, run, step=step, no_dist=True)
    else:
        tte.load(state, step_of_run(run, step, fallback), no_dist=True)
    assert differences(state, state_of(state["step"], mark)) == []
    return int(state["step"])


def steps(run: Path) -> list[int]:
    return sorted(find_steps(run))


def aside(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("abandoned/*/*"))


def latest_everywhere(run: Path, **options: Any) -> set[int]:
    """The latest step as each reader and command says it."""
    path = tte.latest(run)
    printed = call("latest", str(run)).out.strip()
    assert path is not None and printed == str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {int(path.name[5:]), loaded(run, "latest", 0.5, **options), loaded(run, "last-good", 0.5, **options)}


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch, "_last_names", {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save_step(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize("way", ["ours", "in a thread", "dcp.save", "by stock before"])
def test_newer_steps_are_set_aside_once_and_the_branch_goes_on(tmp_path: Path, way: str) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        if way == "by stock before":
            save(state_of(step), dcp.FileSystemWriter(run / f"step-{step}"))
        else:
            save_step(run, step)
    assert loaded(run, 10) == 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (11, 12, 13, 14):
            state = state_of(step, 0.5)
            if way == "dcp.save":
                writer = FileWriter(run / f"step-{step}")
                dcp.save(state, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
            elif way == "in a thread":
                save_of_run(state, run / f"step-{step}", keep=3, is_async=True).result()
            else:
                save_step(run, step, 0.5, keep=3)
    said = [str(one.message) for one in caught if "goes on" in str(one.message)]
    assert len(said) == 1 and "with step 11, below its step(s) 20, 30" in said[0], said
    assert steps(run) == ([10, 11, 12, 13, 14] if way == "dcp.save" else [12, 13, 14])
    assert aside(run) == ["step-20", "step-30"] and latest_everywhere(run) == {14}
    (old,) = run.glob("abandoned/11-*")
    assert loaded(old / "step-30") == 30 and loaded(old, "latest") == 30
    with pytest.raises(NoCheckpointError, match="of step 30: .*; the run was set back and has left it behind, load it"):
        loaded(run, 30)


def test_a_record_names_the_parent_and_what_was_left(run: Path) -> None:
    loaded(run, 10)
    with pytest.warns(UserWarning, match=NEWER):
        save_step(run, 11)
    notes = _core.parse_index((run / "step-11" / ".tte_index").read_bytes(), "index").notes
    parent = _core.parse_index((run / "step-10" / ".tte_index").read_bytes(), "index").save_id.hex()
    assert notes["parent"] == f"step-10 {parent}"
    assert [text.partition(":")[0] for text in notes["abandoned"].split()] == ["30", "20"]


def test_a_step_of_the_abandoned_branch_is_saved_over_and_the_ones_above_go(run: Path) -> None:
    loaded(run, 10)
    with pytest.warns(UserWarning, match="with step 20, below its step\\(s\\) 30"):
        save_step(run, 20, 0.5)
    assert steps(run) == [10, 20] and latest_everywhere(run) == {20}
    save_step(run, 30, 0.5)  # the branch reaches the number again
    assert latest_everywhere(run) == {30} and aside(run) == ["step-30"]


def test_a_save_of_the_same_step_again_leaves_the_others(run: Path) -> None:
    loaded(run, 20)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*goes on")
        save_step(run, 20)
        save_step(run, 20)
    assert steps(run) == [10, 20, 30] and tte.latest(run) == run / "step-30"


def test_saves_of_a_run_that_is_not_set_back_say_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*goes on")
        for step in (1, 2, 2, 3):
            save_step(tmp_path, step)
        tte.save(state_of(1), tmp_path / "final", no_dist=True)
    assert sorted(os.listdir(tmp_path)) == ["final", "step-1", "step-2", "step-3"]


def kill_in(run: Path, name: str, at: int) -> None:
    """Saves step 11 in a process of its own that is killed before this call, of this name, counted from 1."""
    calls = iter(range(1, 100))
    module = branch if name == "locked" else os
    original = getattr(module, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        if "step-" in str(arguments[0]) or name == "mkdir":
            if next(calls) == at:
                die()
        return original(*arguments, **options)

    setattr(module, name, dying)
    warnings.simplefilter("ignore")
    save_step(run, 11, 0.5)


@pytest.mark.parametrize(
    ("name", "at", "left"), [("locked", 1, 2), ("rename", 1, 2), ("locked", 2, 1), ("rename", 2, 1)]
)
def test_a_kill_while_steps_are_set_aside(run: Path, name: str, at: int, left: int) -> None:
    loaded(run, 10)
    process = multiprocessing.get_context("fork").Process(target=kill_in, args=(run, name, at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(steps(run)) == 2 + left and latest_everywhere(run) == {11}
    assert loaded(run, 20) == 20  # whole, where it is
    (listed,) = [row["state"] for row in call("ls", str(run), "--json").json["steps"] if row["step"] == 20]
    assert listed == "abandoned"
    with pytest.warns(UserWarning, match="with step 12, below its step"):
        save_step(run, 12, 0.5, keep=2)
    assert steps(run) == [11, 12] and aside(run) == ["step-20", "step-30"] and not list(run.glob(".tte*"))
    assert all(loaded(path) for path in run.glob("abandoned/*/*"))


@pytest.fixture
def stuck(run: Path) -> Iterator[Path]:
    """A run whose steps cannot be set aside."""
    (run / "abandoned").touch()
    loaded(run, 10)
    with pytest.warns(UserWarning, match="step-30 stays, and loads pass over it: it cannot be moved"):
        save_step(run, 11, 0.5, keep=3)
    yield run


def test_what_cannot_be_moved_is_passed_over(stuck: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (12, 13):
            save_step(stuck, step, 0.5, keep=3)
    assert steps(stuck) == [11, 12, 13, 20, 30] and latest_everywhere(stuck) == {13}
    save_step(stuck, 40, 0.5, keep=1)  # beyond the abandoned ones, which are not counted, nor removed
    assert steps(stuck) == [20, 30, 40] and tte.latest(stuck) == stuck / "step-40"


def test_a_stock_save_above_is_newer_than_the_record(stuck: Path) -> None:
    shutil.rmtree(stuck / "step-30")
    save(state_of(30, 0.5), dcp.FileSystemWriter(stuck / "step-30"))
    assert latest_everywhere(stuck) == {30}


def test_steps_of_another_job_that_are_saved_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FileWriter.finish

    def finish_later(writer: FileWriter, metadata: Any, results: Any) -> None:
        monkeypatch.setattr(FileWriter, "finish", original)
        other_job = threading.Thread(target=save_step, args=(tmp_path, 30))  # one thread saves one step at a time
        other_job.start()
        other_job.join()
        original(writer, metadata, results)

    monkeypatch.setattr(FileWriter, "finish", finish_later)
    save_step(tmp_path, 20)
    assert steps(tmp_path) == [20, 30] and tte.latest(tmp_path) == tmp_path / "step-30"


def test_links_to_another_run_stay(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_step(other, 40)
    (run / "step-40").symlink_to(other / "step-40")
    loaded(run, 10)
    with pytest.warns(UserWarning, match="below its step\\(s\\) 20, 30, 40"):
        save_step(run, 11, 0.5)
    assert steps(run) == [10, 11, 40] and latest_everywhere(run) == {11}


def test_both_directories_of_a_run_with_a_fallback(
    run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = tmp_path_factory.mktemp("local")
    folder = Path(folders_in_fallback(run, fallback)[0])
    folder.mkdir()
    os.rename(run / "step-30", folder / "step-30")
    loaded(run, 10)
    with pytest.warns(UserWarning, match=NEWER):
        save_step(run, 11, 0.5, fallback=fallback)
    assert steps(run) == [10, 11] and steps(folder) == [] and latest_everywhere(run, fallback=fallback) == {11}
    # Storage refuses step 12: it lies in the fallback, and what it leaves behind in the run.
    save_step(run, 40)
    loaded(run, 11, 0.5)
    original = FileWriter.prepare_global_plan

    def full_disk(writer: FileWriter, plans: Any) -> Any:
        if writer.target.parent == run:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, plans)

    monkeypatch.setattr(FileWriter, "prepare_global_plan", full_disk)
    with pytest.warns(UserWarning, match="with step 12, below its step\\(s\\) 40"):
        save_step(run, 12, 0.5, fallback=fallback)
    assert steps(folder) == [12] and loaded(run, "latest", 0.5, fallback=fallback) == 12


def test_abandoned_steps_are_listed_and_removed(stuck: Path) -> None:
    (stuck / "abandoned").unlink()
    with pytest.warns(UserWarning, match="goes on"):
        save_step(stuck, 12)
    (folder,) = stuck.glob("abandoned/*")
    listed = call("ls", str(stuck))
    assert f"{folder}/step-20" in listed.out and "gc" in listed.out and "--abandoned" in listed.out
    assert [Path(one["path"]).name for one in call("ls", str(stuck), "--json").json["abandoned"]] == [
        "step-20",
        "step-30",
    ]
    (folder / "step-20" / "notes.txt").touch()
    kept = call("gc", str(stuck), "--abandoned")
    assert "--yes" in kept.out and len(aside(stuck)) == 2
    removed = call("gc", str(stuck), "--abandoned", "--yes", "--json").json
    assert steps(stuck) == [10, 11, 12] and removed["freed_bytes"] > 0 and removed["removed"] == []
    assert os.listdir(folder) == ["step-20"] and os.listdir(folder / "step-20") == ["notes.txt"]
    assert call("gc", str(stuck)).code == 2


def test_readers_through_dcp_say_which_step_a_run_goes_on_from(run: Path) -> None:
    state = blank(state_of(0))
    dcp.load(state, storage_reader=FileReader(run / "step-10"), planner=tte.LoadPlanner(), no_dist=True)
    with pytest.warns(UserWarning, match="below its step\\(s\\) 30"):
        save_step(run, 20, 0.5)
    assert latest_everywhere(run) == {20}
