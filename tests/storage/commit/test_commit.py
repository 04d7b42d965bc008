"""One rename makes a checkpoint: what lies where before, meanwhile and after it, and whose files are left alone."""

import errno
import json
import os
import signal
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm_processes
from eventually import eventually
from states import blank, differences, load, save
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, SavedOverError, SaveInProgressError
from torchtitan_ext.storage import FileReader, FileWriter, checkpoint_files
from torchtitan_ext.storage.commit import commit, leftovers, save_lock

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint in .* is overwritten")

STAGED = [".metadata", ".tte_index", "__0_0.distcp"]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((30, 20), float(step)), "b": torch.full((7,), float(step)), "step": step}


def save_step(path: Path, step: int, **options: Any) -> None:
    tte.save(state_of(step), storage_writer=FileWriter(path, sync=False, **options), no_dist=True)


def check_step(path: Path, step: int) -> None:
    loaded = blank(state_of(step))
    tte.load(loaded, storage_reader=FileReader(path, "all"), no_dist=True)
    assert differences(loaded, state_of(step)) == []


def without_ids(path: Path) -> list[str]:
    ids = {name: leftovers.save_id_of(name) or "." for name in names(path)}
    return sorted(name[: name.rindex(save_id)] + "ID" if save_id != "." else name for name, save_id in ids.items())


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


IN_PLACE = [".metadata", ".tte_index.ID", "__0_ID"]


@pytest.mark.parametrize("before", ["absent", "empty", "ours", "stock", "in place"])
def test_a_directory_of_checkpoint_files_is_replaced_whole(tmp_path: Path, before: str) -> None:
    target = tmp_path / "run" / "step-1"
    if before != "absent":
        target.mkdir(parents=True)
    if before == "ours":
        save_step(target, 1)
    if before == "stock":
        save(state_of(1), dcp.FileSystemWriter(target))
    if before == "in place":
        (target / "config.json").touch()
        save_step(target, 1)
        (target / "config.json").unlink()
    save_step(target, 2)
    check_step(target, 2)
    assert names(target) == STAGED and names(target.parent) == ["step-1"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    for step in range(3):
        save_step(tmp_path, step)
        check_step(tmp_path, step)
        assert without_ids(tmp_path) == sorted([*IN_PLACE, "config.json", "logs"])
    loaded = blank(state_of(2))
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert differences(loaded, state_of(2)) == []


def test_stock_files_are_replaced_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    save(state_of(0), dcp.FileSystemWriter(tmp_path))
    save_step(tmp_path, 1)
    check_step(tmp_path, 1)
    assert without_ids(tmp_path) == sorted([*IN_PLACE, "config.json"])


def no_exchange(*_: Any, **__: Any) -> None:
    raise OSError(errno.EINVAL, "no exchange here")


def test_without_an_exchange_files_are_replaced_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path / "step-1", 1)
    monkeypatch.setattr(commit._core, "exchange_paths", no_exchange)
    save_step(tmp_path / "step-1", 2)
    check_step(tmp_path / "step-1", 2)
    assert without_ids(tmp_path / "step-1") == IN_PLACE and names(tmp_path) == ["step-1"]
    save_step(tmp_path / "step-2", 3)
    assert names(tmp_path / "step-2") == STAGED


@pytest.mark.parametrize("reason", ["fuse", "mounted", "unwritable"])
def test_a_target_that_cannot_be_renamed_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    target = tmp_path / "step-1"
    target.mkdir()
    if reason == "fuse":
        monkeypatch.setattr(commit._core, "is_on_fuse", lambda path: True)
    elif reason == "mounted":
        monkeypatch.setattr(commit, "_is_mounted", lambda path: True)
    else:
        monkeypatch.setattr(commit.os, "access", lambda path, mode: False)
    for step in range(2):
        save_step(target, step)
        check_step(target, step)
    assert without_ids(target) == IN_PLACE and names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("is_staged", [True, False])
def test_what_cannot_be_removed_after_the_rename_does_not_make_a_save_fail(
    tmp_path: Path, is_staged: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "step-1"
    save_step(target, 0)
    if not is_staged:
        (target / "config.json").touch()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(commit.SaveLock, "release", lambda lock: None)
    monkeypatch.setattr(leftovers.Path, "unlink", refuse)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* stays: it cannot be removed")
        save_step(target, 1)
    monkeypatch.undo()
    check_step(target, 1)
    assert "stays: it cannot be removed (not yours)" in capsys.readouterr().err


def test_mounts_are_known() -> None:
    assert commit._is_mounted(Path("/proc"))
    assert not commit._is_mounted(Path("/proc/self"))


def test_a_link_to_a_directory_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for step in range(2):
        save_step(tmp_path / "link", step)
        check_step(tmp_path / "real", step)
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", [".metadata.tmp", ".metadata"])
def test_a_link_where_a_file_of_the_save_is_to_lie_is_replaced(tmp_path: Path, name: str) -> None:
    target, other = tmp_path / "step-1", tmp_path / "other"
    (target / "logs").mkdir(parents=True)
    other.write_text("theirs")
    (target / name).symlink_to(other)
    save_step(target, 1)
    check_step(target, 1)
    assert other.read_text() == "theirs" and not (target / name).is_symlink()


def test_the_mode_of_the_directory_stays(tmp_path: Path) -> None:
    save_step(tmp_path / "step-1", 1)
    (tmp_path / "step-1").chmod(0o2750)
    save_step(tmp_path / "step-1", 2)
    assert (tmp_path / "step-1").stat().st_mode & 0o7777 == 0o2750


def test_a_file_that_others_put_there_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path / "step-1", 1)
    original = save_lock.SaveLock.check

    def check(self: save_lock.SaveLock) -> None:
        (tmp_path / "step-1" / "meta.pt").write_text("theirs")
        original(self)

    monkeypatch.setattr(save_lock.SaveLock, "check", check)
    save_step(tmp_path / "step-1", 2)
    check_step(tmp_path / "step-1", 2)
    assert names(tmp_path / "step-1") == [*STAGED, "meta.pt"] and names(tmp_path) == ["step-1"]


def saved_step(run: Path, foreign: bool) -> Path:
    """A saved step, with a directory of somebody else in it or without."""
    target = run / "step-1"
    if foreign:
        (target / "logs").mkdir(parents=True)
    save_step(target, 1)
    return target


@pytest.mark.parametrize("foreign", [False, True])
def test_a_failed_save_leaves_nothing_and_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    target = saved_step(tmp_path, foreign)
    before = names(target)
    monkeypatch.setattr(commit, "write_file", no_exchange)
    with pytest.raises(tte.errors.CheckpointFailedError, match="no exchange here"):
        save_step(target, 2)
    check_step(target, 1)
    assert names(target) == before and names(tmp_path) == ["step-1"]


class Preempted(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("raised", [Preempted, KeyboardInterrupt, TimeoutError])
def test_a_signal_right_after_the_rename_loses_nothing_and_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool, raised: type[BaseException]
) -> None:
    target = saved_step(tmp_path, foreign)
    calls: list[str] = []

    def handle(*_: object) -> None:
        raise raised("now")

    def then_signal(change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            change(*args)
            if "exchange" in calls or foreign:
                calls.append("renamed")
                signal.raise_signal(signal.SIGUSR1)
            calls.append("exchange")  # the one of the probes

        return call

    place, name = (commit.os, "rename") if foreign else (commit._core, "exchange_paths")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, then_signal(getattr(place, name)))
        patch.setattr(commit, "sync_directory", lambda path: calls.append(f"sync {path.name}"))
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with pytest.raises((raised, CheckpointFailedError), match="now"):
                tte.save(state_of(2), target, no_dist=True)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert calls[calls.index("renamed") + 1 :] == [f"sync {target.name if foreign else tmp_path.name}"]
    check_step(target, 2)
    assert names(tmp_path) == ["step-1"]
    assert (without_ids(target) == sorted([*IN_PLACE, "logs"])) if foreign else (names(target) == STAGED)


@pytest.mark.parametrize("foreign", [False, True])
def test_where_nobody_can_say_whether_a_rename_took_effect_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    target = saved_step(tmp_path, foreign)
    read = Path.read_bytes

    def unreadable(path: Path) -> bytes:
        if path.name in (".metadata", ".metadata.tmp", ".tte_index"):
            raise OSError(errno.EIO, "the server is away")
        return read(path)

    def rename(change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            change(*args)
            if foreign or ".tte_probe" not in str(args[0]):
                monkeypatch.setattr(Path, "read_bytes", unreadable)
                raise OSError(errno.EIO, "the server is away")

        return call

    place, name = (commit.os, "rename") if foreign else (commit._core, "exchange_paths")
    monkeypatch.setattr(place, name, rename(getattr(place, name)))
    with pytest.raises(CheckpointFailedError, match="the server is away"):
        save_step(target, 2)
    monkeypatch.undo()
    check_step(target, 2)


# ---- two saves in one place ----

HOLDS = """
import sys, threading
from pathlib import Path
from torchtitan_ext.storage.commit.commit import begin_save
save = begin_save(Path(sys.argv[1]), "5" * 32)
print("held", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def other_job(tmp_path: Path) -> Any:
    """A process that is in the middle of a save."""
    process = warm_processes.Popen(["-c", HOLDS, tmp_path / "step-1"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_two_jobs_in_one_place(tmp_path: Path, other_job: Any) -> None:
    with pytest.raises(
        SaveInProgressError, match=rf"step-1 is being saved to by process {other_job.pid} on \S+, since"
    ):
        save_step(tmp_path / "step-1", 1)
    save_step(tmp_path / "step-0", 2)  # beside it, and its stage stays
    assert f".tte-{'5' * 32}" in names(tmp_path)
    other_job.kill()
    other_job.wait()
    save_step(tmp_path / "step-1", 1)
    check_step(tmp_path / "step-1", 1)
    assert names(tmp_path) == ["step-0", "step-1"]


def test_the_stage_of_a_lock_that_cannot_be_read_yet_stays(tmp_path: Path, other_job: Any) -> None:
    """Another machine sees a lock before what its owner has written into it."""
    commit.lock_path(tmp_path / "step-1").write_text("")
    save_step(tmp_path / "step-2", 2)
    assert f".tte-{'5' * 32}" in names(tmp_path)


def test_any_save_of_a_run_cleans_up_after_dead_ones(tmp_path: Path, other_job: Any) -> None:
    other_job.kill()
    other_job.wait()
    assert len(names(tmp_path)) == 2
    save_step(tmp_path / "step-7", 7)
    assert names(tmp_path) == ["step-7"]


def written_by_another_machine(path: Path, seconds_ago: float) -> Path:
    lock = commit.lock_path(path)
    owner = save_lock.Owner("7" * 32, str(path), "node-7", "another boot", 4711, 4711, "1", 1e9)
    lock.write_text(json.dumps(owner.__dict__) + "\n" + json.dumps({"is_staged": True}) + "\n")
    os.utime(lock, (0, os.stat(lock).st_mtime - seconds_ago))
    return lock


def test_another_machine_is_dead_when_it_does_not_touch_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "step-1"
    lock = written_by_another_machine(target, save_lock.STALE_SECONDS - 30)
    with pytest.raises(SaveInProgressError, match="process 4711 on node-7, since 2001-09-09 01:46:40 UTC"):
        save_step(target, 1)
    long_ago = os.stat(lock).st_mtime - save_lock.STALE_SECONDS
    os.utime(lock, (0, long_ago))
    look, looks = save_lock.read_lock, 0

    def look_and_touch(path: Path) -> Any:
        nonlocal looks
        looks += path == lock
        if looks == 3:
            os.utime(lock)
        return look(path)

    with monkeypatch.context() as patched:  # its clock is behind; it lives
        patched.setattr(save_lock, "read_lock", look_and_touch)
        with pytest.raises(SaveInProgressError):
            save_step(target, 1)
    assert looks == 3
    os.utime(lock, (0, long_ago))
    monkeypatch.setattr(save_lock, "_WATCH_SECONDS", 0.2)
    save_step(target, 1)
    assert names(tmp_path) == ["step-1"]


def test_a_lock_without_its_first_line_is_dead_after_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "_EMPTY_SECONDS", 0.3)
    commit.lock_path(tmp_path / "step-1").write_text('{"save_id"')
    save_step(tmp_path / "step-1", 1)
    assert names(tmp_path) == ["step-1"]


def test_a_living_save_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT_SECONDS", 0.05)
    running = commit.begin_save(tmp_path / "step-1", "1" * 32)
    lock = commit.lock_path(tmp_path / "step-1")
    os.utime(lock, (0, 0))
    eventually(lambda: os.stat(lock).st_mtime > 0)
    running.abandon()
    assert names(tmp_path) == []


@pytest.mark.parametrize("foreign", [False, True])
def test_who_was_taken_for_dead_does_not_commit(tmp_path: Path, foreign: bool) -> None:
    target = saved_step(tmp_path, foreign)
    stopped = commit.begin_save(target, "1" * 32)
    save_step(target, 2)  # this thread's earlier save has ended
    with pytest.raises((SaveInProgressError, FileNotFoundError)):
        stopped.commit(b"index", b"metadata", sync=False)
    check_step(target, 2)
    running = commit.begin_save(target, "2" * 32)
    commit.lock_path(target).unlink()
    written_by_another_machine(target, 0)
    with pytest.raises(SaveInProgressError, match="node-7"):
        running.commit(b"index", b"metadata", sync=False)
    check_step(target, 2)


@pytest.mark.parametrize("place", ["staged", "in place"])
def test_whom_the_others_gave_up_while_it_wrote_the_metadata_does_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As of a coordinator that was stopped in there, and goes on."""
    target = tmp_path / "step-1"
    if place == "in place":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    save_step(target, 1)
    before = names(target)
    given_up: list[str] = []

    def confirm(phases: Phases) -> None:
        if given_up:
            raise LostRankError("save", "ranks exchanged plans", None, (0,), "rank 1 waited")

    def write_and_stop(path: Path, content: bytes, *, sync: bool) -> None:
        checkpoint_files.write_file(path, content, sync=sync)
        given_up.append(path.name)

    monkeypatch.setattr(Phases, "confirm", confirm)
    monkeypatch.setattr(commit, "write_file", write_and_stop)
    with pytest.raises(LostRankError, match="rank 1 waited"):
        save_step(target, 2)
    assert given_up and set(names(target)) - {".metadata.tmp"} == set(before) and names(tmp_path) == ["step-1"]
    check_step(target, 1)
    monkeypatch.undo()
    save_step(target, 2)
    check_step(target, 2)


def test_a_failed_save_of_dcp_does_not_lock_out_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(commit, "write_file", no_exchange)
        with pytest.raises(CheckpointException) as failed:
            save(state_of(1), FileWriter(tmp_path / "step-1"))
    save(state_of(2), FileWriter(tmp_path / "step-1"))
    check_step(tmp_path / "step-1", 2)
    assert names(tmp_path) == ["step-1"] and failed


# ---- load while saving ----


def saving_before(reader: FileReader, hook: str, save_over: Callable[[], None]) -> None:
    """Saves over the checkpoint once, right before a call of its reader."""
    original = getattr(reader, hook)
    calls: list[str] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append(hook)
            save_over()
        return original(*args, **kwargs)

    setattr(reader, hook, called)


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("hook", ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "read_data"])
def test_a_load_while_the_next_save_commits_sees_one_whole(tmp_path: Path, hook: str, foreign: bool) -> None:
    target = saved_step(tmp_path, foreign)
    reader = FileReader(target, "all")
    saving_before(reader, hook, lambda: save_step(target, 2))
    loaded = blank(state_of(1))
    tte.load(loaded, storage_reader=reader, no_dist=True)
    assert differences(loaded, state_of(loaded["step"])) == [] and loaded["step"] in (1, 2)


def test_dcp_says_that_the_checkpoint_was_saved_over(tmp_path: Path) -> None:
    save_step(tmp_path / "step-1", 1)
    reader = FileReader(tmp_path / "step-1")
    saving_before(reader, "prepare_local_plan", lambda: save_step(tmp_path / "step-1", 2))
    with pytest.raises(CheckpointException) as failed:
        load(blank(state_of(1)), reader)
    assert isinstance(failed.value.failures[0][0], SavedOverError)
    assert "step-1 was saved over while it was read" in str(failed.value.failures[0][0])


def load_apart(rank: int, world_size: int, path: Path) -> Any:
    reader = FileReader(path, "all")
    if rank == 1:
        saving_before(reader, "read_metadata", lambda: save_step(path, 2))
    loaded = blank(state_of(1))
    tte.load(loaded, storage_reader=reader)
    return loaded["step"], differences(loaded, state_of(2))


def test_ranks_that_read_different_saves_begin_anew(run_world: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    save_step(tmp_path, 1)
    assert run_world(2, load_apart, tmp_path) == [(2, [])] * 2


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path / "step-1", 1)
    (tmp_path / "step-1" / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (tmp_path / "step-1" / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(tte.errors.DamagedCheckpointError, match="which is outside of the checkpoint"):
        check_step(tmp_path / "step-1", 1)
