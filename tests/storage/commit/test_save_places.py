"""Places that a save may meet: its own directory, locks of other times, what other users left, attributes."""

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import without_metadata
from states import blank, differences, save_of_run
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

import torchtitan_ext as tte
from torchtitan_ext.errors import DamagedCheckpointError, SaveInProgressError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.commit import commit, leftovers, save_lock
from torchtitan_ext.storage.inspect import verify
from torchtitan_ext.storage.runs import retention as runs

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint in .* is overwritten")


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((30, 20), float(step)), "step": step}


def save_step(path: str | Path, step: int) -> None:
    tte.save(state_of(step), storage_writer=FileWriter(path, sync=False), no_dist=True)


def check_step(path: str | Path, step: int) -> None:
    loaded = blank(state_of(step))
    tte.load(loaded, path, no_dist=True)
    assert differences(loaded, state_of(step)) == []


def test_the_directory_that_the_process_runs_in_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in range(2):
        save_step(".", step)
        assert os.getcwd() == str(tmp_path)
        check_step(tmp_path, step)


@pytest.mark.parametrize("place", ["staged", "in place", "without .metadata"])
def test_a_path_need_not_be_text(tmp_path: Path, place: str) -> None:
    path = tmp_path / os.fsdecode(b"run-\xff") / os.fsdecode(b"step-\xfe")
    if place == "in place":
        path.mkdir(parents=True)
        (path / "notes.txt").write_text("mine")
    for step in range(2):
        tte.save(state_of(step), storage_writer=FileWriter(path, sync=False), no_dist=True)
        if place == "without .metadata":
            without_metadata(path)
        check_step(path, step)
    assert verify.find_damage(path) is None
    (path / FileReader(path).read_metadata().storage_data[MetadataIndex("step")].relative_path).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="run-.*has 0 bytes, expected"):
        check_step(path, 1)


def test_a_relative_path_means_what_it_meant_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = FileWriter("step-1", sync=False)
    prepare = writer.prepare_global_plan

    def prepare_and_move(plans: Any) -> Any:
        plans = prepare(plans)
        os.chdir("elsewhere")
        return plans

    monkeypatch.setattr(writer, "prepare_global_plan", prepare_and_move)
    tte.save(state_of(1), storage_writer=writer, no_dist=True)
    check_step(tmp_path / "step-1", 1)


def dead_owner(target: Path) -> save_lock.Owner:
    """Of a thread of this machine that is gone."""
    code = (
        "from torchtitan_ext.storage.commit import save_lock; "
        f"print(json.dumps(vars(save_lock._this_thread('8' * 32, {str(target)!r}))))"
    )
    text = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    return save_lock.Owner(**json.loads(text.stdout))


def write_lock(path: Path, owner: save_lock.Owner) -> None:
    path.write_text(json.dumps(vars(owner)) + "\n" + json.dumps({"is_staged": False}) + "\n")


@pytest.mark.parametrize("name", [".tte_save", "__3.tte_save"])
def test_a_dead_lock_in_the_target_is_removed(tmp_path: Path, name: str) -> None:
    """It was made where nothing could be made beside the target, as where that is mounted, or by a rank of its own."""
    target = tmp_path / "step-1"
    target.mkdir()
    write_lock(target / name, dead_owner(target))
    save_step(target, 1)
    check_step(target, 1)
    assert sorted(os.listdir(target)) == [".metadata", ".tte_index", "__0_0.distcp"]


@pytest.mark.parametrize("name", [".tte_save", "__3.tte_save"])
def test_a_living_lock_in_the_target_is_respected(tmp_path: Path, name: str) -> None:
    target = tmp_path / "step-1"
    target.mkdir()
    write_lock(target / name, save_lock.Owner("8" * 32, str(target), "node-7", "another boot", 1, 1, "1", 1e9))
    with pytest.raises(SaveInProgressError, match="node-7"):
        save_step(target, 1)
    assert os.listdir(target) == [name] and os.listdir(tmp_path) == ["step-1"]


def test_a_text_path_below_directories_of_others_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path / "step-1", 1)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    check_step(str(tmp_path / "step-1"), 1)
    tte.save(state_of(2), str(tmp_path / "step-2"), no_dist=True)
    assert any(name.startswith(".tte_index") for name in os.listdir(tmp_path / "step-2"))
    check_step(str(tmp_path / "step-2"), 2)
    assert not FileReader.validate_checkpoint_id("memory://bucket/step-1")


def test_what_other_users_left_does_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "step-1"
    write_lock(commit.lock_path(theirs), dead_owner(theirs))
    (tmp_path / f".tte-{'8' * 32}").mkdir()
    (tmp_path / f".tte-{'9' * 32}").mkdir()
    original_names, original_unlink = leftovers.checkpoint_names, Path.unlink

    def checkpoint_names(directory: Path) -> Any:
        if directory.name.startswith(".tte-8"):
            raise PermissionError(13, "Permission denied", str(directory))
        return original_names(directory)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == commit.lock_path(theirs):
            raise PermissionError(1, "Operation not permitted", str(path))
        original_unlink(path, missing_ok)

    monkeypatch.setattr(leftovers, "checkpoint_names", checkpoint_names)
    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.warns(UserWarning, match="Permission denied"):
        save_step(tmp_path / "step-2", 2)
    check_step(tmp_path / "step-2", 2)
    assert f".tte-{'9' * 32}" not in os.listdir(tmp_path)


def test_a_lock_that_cannot_be_read_may_own_any_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = commit.lock_path(tmp_path / "step-1")
    write_lock(theirs, dead_owner(tmp_path / "step-1"))
    (tmp_path / f".tte-{'8' * 32}").mkdir()
    original = save_lock.read_lock

    def read_lock(path: Path) -> Any:
        if path == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(leftovers, "read_lock", read_lock)
    save_step(tmp_path / "step-2", 2)
    assert f".tte-{'8' * 32}" in os.listdir(tmp_path)


def test_what_cannot_be_removed_after_the_commit_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "step-1"
    save_step(target, 1)
    original = leftovers.checkpoint_names

    def checkpoint_names(directory: Path) -> Any:
        if directory.name.startswith(".tte-"):
            raise OSError(5, "Input/output error", str(directory))
        return original(directory)

    monkeypatch.setattr(leftovers, "checkpoint_names", checkpoint_names)
    with pytest.warns(UserWarning, match="Input/output error"):
        save_step(target, 2)
    check_step(target, 2)


def test_a_step_that_goes_while_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan removes old steps, too, in a thread."""
    for step in range(3):
        save_step(tmp_path / f"step-{step}", step)
    original = runs.step_paths
    monkeypatch.setattr(runs, "step_paths", lambda run, pattern: original(run, pattern) | {7: tmp_path / "step-7"})
    save_of_run(state_of(3), tmp_path / "step-3", no_dist=True, keep=2)
    monkeypatch.undo()
    assert sorted(runs.step_paths(tmp_path, None)) == [2, 3]


def test_a_writer_whose_save_has_failed_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dcp.async_save`` sends it to its process."""
    writer = FileWriter(tmp_path / "step-1", sync=False)
    with monkeypatch.context() as patched, pytest.raises(CheckpointException):
        patched.setattr(commit, "write_file", lambda *_, **__: 1 / 0)
        dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    ids = set()
    for step in range(2):
        sent = pickle.loads(pickle.dumps(writer))
        dcp.save(state_of(step), storage_writer=sent, no_dist=True)
        check_step(tmp_path / "step-1", step)
        ids.add(sent.save_id)
    assert len(ids) == 2


def test_a_writer_that_is_used_again_does_not_write_over_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()  # so that files are replaced in place
    writer = FileWriter(tmp_path, sync=False)
    dcp.save(state_of(1), storage_writer=writer)
    with monkeypatch.context() as patched, pytest.raises(CheckpointException):
        patched.setattr(commit, "write_file", lambda *_, **__: 1 / 0)
        dcp.save(state_of(2), storage_writer=writer)
    check_step(tmp_path, 1)
    dcp.save(state_of(3), storage_writer=writer)
    check_step(tmp_path, 3)


def test_the_file_that_is_missed_is_metadata(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missed:
        FileReader(tmp_path).read_metadata()
    assert missed.value.filename == str(tmp_path / ".metadata")


def test_attributes_of_the_directory_stay(tmp_path: Path) -> None:
    """Access lists are such, and the stripes of Lustre."""
    target = tmp_path / "step-1"
    target.mkdir()
    try:
        os.setxattr(target, "user.stripes", b"8")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    for step in range(2):
        save_step(target, step)
        check_step(target, step)
        assert os.getxattr(target, "user.stripes") == b"8"


def test_nothing_is_warned_of_in_a_first_save(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_step(tmp_path / "step-1", 1)
