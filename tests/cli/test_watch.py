"""``torchtitan-ext watch``: what is told of saves, real ones, that land, die, fail, or stand still meanwhile."""

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_processes
from calls import call, make

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.cli.output import FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.commit import branch
from torchtitan_ext.storage.commit.commit import RunningSave
from torchtitan_ext.storage.runs.changes import RunWatch

# All files are written, and nothing is committed.
SAVE_AND_WAIT = """
import sys, torch
import torchtitan_ext as tte
from torchtitan_ext.storage.commit.commit import RunningSave
RunningSave.commit = lambda *_, **__: (print("written", flush=True), sys.stdin.read())
tte.save({"w": torch.ones(9)}, sys.argv[1], no_dist=True)
"""


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch, "_last_names", {})


def save(run: Path, step: int, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tte.save({"w": torch.full((9,), float(step))}, run / f"step-{step}", no_dist=True, **options)


class Saving:
    """Another process that saves, and waits right before its commit until it is killed."""

    def __init__(self, path: Path) -> None:
        command = ["-c", SAVE_AND_WAIT, path]
        self._process = warm_processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == "written\n"

    def die(self) -> None:
        self._process.kill()
        self._process.wait()


def changes(watch: RunWatch) -> list[tuple[str, int]]:
    """Looks in another thread: for the thread that saves its own lock is one that it has left."""
    with ThreadPoolExecutor(1) as pool:
        return [(change.kind, change.step.step) for change in pool.submit(watch.look).result()]


@contextmanager
def watching(run: Path, *options: str) -> Iterator[Any]:
    """The command as a process that has looked at a run which is not there yet."""
    command = [sys.executable, "-m", "torchtitan_ext", "watch", run, "--interval", "0.05", *options]
    # A shell's background job ignores Ctrl-C, and so do its children.
    hears = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=hears) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().endswith("run: No such file or directory; looking again\n")
            yield process
        finally:
            process.kill()


def test_steps_are_told_as_they_land(tmp_path: Path) -> None:
    """Each save waits until the one before it was told."""
    run = tmp_path / "run"
    with watching(run, "--json", "--steps", "3") as process:
        for step in (10, 20, 30):
            save(run, step, keep=2)
            told = json.loads(process.stdout.readline())
            assert (told["kind"], told["step"], told["world_size"]) == ("landed", step, 1)
            assert list(told["seconds"]) == ["prepare", "plan", "write"] and told["at"] == told["finished_at"]
            assert told["num_bytes"] == sum(path.stat().st_size for path in (run / f"step-{step}").iterdir())
        assert process.stderr.read() == "" and process.wait() == FINE


def test_lines_for_people(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    done = call("watch", tmp_path, "--steps", 0)
    assert (done.code, done.err) == (FINE, "")
    for step, line in enumerate(done.out.splitlines(), 1):
        at, _, text = line.partition(f" UTC  step {step}: ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", at)
        assert re.fullmatch(r"2\.\d kB by 1 rank, \d+\.\d\d s \(prepare 0\.\d{3}, plan .*, write .*\)", text)
    run = tmp_path / "run"
    with watching(run) as process:
        killed = Saving(run / "step-1")
        while not list(run.glob(".tte_save-*")):
            pass
        save(run, 2)
        assert "  step 2: 2" in process.stdout.readline()
        killed.die()
        assert re.search(r"  step 1: failed: the save of process .* UTC, has left no step\n", process.stdout.readline())
        save(run, 2)
        assert process.stdout.readline().endswith("), saved again\n")
        save(run, 3, keep=1)
        assert " step 3: " in process.stdout.readline()
        assert process.stdout.readline().endswith("  step 2: removed\n")


def test_only_the_newest_of_many_steps_are_told_first(tmp_path: Path) -> None:
    for step in range(1, 14):
        make(tmp_path / f"step-{step}", "ours", {"w": torch.ones(2)})
    assert [line.split()[4] for line in call("watch", tmp_path, "--steps", 0).out.splitlines()] == [
        f"{step}:" for step in range(4, 14)
    ]


@pytest.mark.parametrize("way", ["save", "async_save", "in a child", "tried again", "dcp.save", "stock"])
def test_seconds_are_those_of_the_phases(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, path = {"w": torch.ones(9)}, tmp_path / "step-1"
    seconds: dict[str, float] = {}
    if way == "save":
        seconds = dict(tte.save(state, path, no_dist=True).seconds)
    elif way == "async_save":
        seconds = dict(tte.async_save(state, path).result().seconds)
    elif way == "in a child":
        stager = CpuStager(process=True)
        seconds = dict(tte.async_save(state, path, stager=stager).result().seconds)
        stager.close()
    elif way == "tried again":
        refuse_once(monkeypatch)
        with tte.CheckpointManager(tmp_path, retries=1) as manager:
            manager.save(state, 1)
            result = manager.wait()
        assert result is not None and "retry" in result.seconds
        seconds = dict(result.seconds)
    else:
        make(path, "stock" if way == "stock" else "ours", state)
    (change,) = RunWatch(tmp_path).look()
    noted = change.step.seconds
    if way == "dcp.save":  # `make` saves by our own
        assert list(noted) == ["prepare", "plan", "write"]
        return
    assert set(noted) == set(seconds)
    for phase, taken in noted.items():
        assert 0 <= taken <= seconds[phase] + 0.001
        assert phase == "write" or abs(taken - seconds[phase]) <= 0.001


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, tries = FileWriter.prepare_global_plan, []

    def refuse_first(writer: FileWriter, plans: Any) -> Any:
        tries.append(plans)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, plans)

    monkeypatch.setattr(FileWriter, "prepare_global_plan", refuse_first)


@pytest.mark.parametrize(
    "text", ["", "write", "write x", "write nan", "write -1.000", "write 00001.000 plan", "0" * 5000 + " "]
)
def test_notes_that_say_something_else_count_as_absent(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-1" / ".tte_index"
    index = _core.parse_index(path.read_bytes(), "index")
    notes = [("world_size", "1"), ("seconds", text), ("abandoned", f"{text}:x y")]
    sealed = _core.encode_index(
        index.save_id, index.metadata_bytes, index.metadata_digest, notes, list(index.files.values())
    )
    path.write_bytes(sealed)
    done = call("watch", tmp_path, "--steps", 0, "--json")
    known = {"write": 1.0} if "00001" in text else {}
    assert done.code == FINE and (done.json["seconds"], done.json["left_behind"]) == (known, [])
    loaded = {"w": torch.zeros(9)}
    tte.load(loaded, tmp_path / "step-1", no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(9))


def test_a_killed_save_has_failed_and_a_step_is_saved_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    watch = RunWatch(tmp_path)
    assert changes(watch) == [("found", 1)]
    killed = {step: Saving(tmp_path / f"step-{step}") for step in (1, 2)}  # over one that is there, and a new one
    assert changes(watch) == []
    for saving in killed.values():
        saving.die()
    found = watch.look()
    assert sorted((change.kind, change.step.step) for change in found) == [("failed", 1), ("failed", 2)]
    assert all(str(change.step.saver).startswith("process ") for change in found)
    assert changes(watch) == []
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert changes(watch) == [("replaced", 1), ("landed", 2)]
    assert changes(watch) == []


def test_a_save_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RunWatch(tmp_path)
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.extend(changes(watch))
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(RunningSave, "commit", fail)
        with pytest.raises(tte.errors.CheckpointFailedError, match="Input/output error"):
            save(tmp_path, 7)
    assert seen == [] and changes(watch) == [("failed", 7)]
    assert os.listdir(tmp_path) == []


def test_a_save_that_was_seen_under_way_lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ``keep`` has removed it again before the next look."""
    commit, watch = RunningSave.commit, RunWatch(tmp_path)

    def look_first(running: RunningSave, *arguments: Any, **options: Any) -> Path:
        assert changes(watch) == ([("found", 1)] if running.place.target.name == "step-1" else [])
        return commit(running, *arguments, **options)

    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(RunningSave, "commit", look_first)
        save(tmp_path, 1)
    assert changes(watch) == [("replaced", 1)]
    with monkeypatch.context() as patched:
        patched.setattr(RunningSave, "commit", look_first)
        save(tmp_path, 2)
    for step in (3, 4):
        save(tmp_path, step, keep=1)
    assert changes(watch) == [("landed", 4), ("removed", 1)]
    killed = Saving(tmp_path / "step-5")
    assert changes(watch) == []
    killed.die()
    save(tmp_path, 6)  # goes on from step 4
    assert changes(watch) == [("landed", 6), ("failed", 5)]


def test_a_save_stands_still(tmp_path: Path) -> None:
    saving, watch = Saving(tmp_path / "step-3"), RunWatch(tmp_path)
    (lock,) = tmp_path.glob(".tte_save-*")
    assert changes(watch) == []
    os.utime(lock, (0, 0))
    assert changes(watch) == [("silent", 3)] and changes(watch) == []
    saving.die()
    assert changes(watch) == [("failed", 3)]


def test_a_run_that_is_set_back(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    watch = RunWatch(tmp_path)
    watch.look()
    tte.load({"w": torch.zeros(9)}, tmp_path, step=10, no_dist=True)
    save(tmp_path, 11)
    (change,) = watch.look()  # the others are not removed: they are left behind
    assert (change.kind, change.step.step, change.step.parent) == ("landed", 11, "step-10")
    assert change.step.left_behind == (20, 30)
    assert "set back to step-10: 20, 30 left behind" in call("watch", tmp_path, "--steps", 0).out
    save(tmp_path, 20)
    assert changes(watch) == [("landed", 20)]
    for path in (tmp_path / "step-20").iterdir():
        path.unlink()
    assert changes(watch) == [("removed", 20)]


def test_what_is_reused_is_told(tmp_path: Path) -> None:
    state = {"w": torch.arange(100_000.0)}
    for step in (1, 2):
        saved = tte.save(state, tmp_path / f"step-{step}", no_dist=True, reuse="latest")
    assert saved.reused_bytes >= 400_000
    first, second = RunWatch(tmp_path).look()
    assert first.step.reused_bytes == 0 and second.step.reused_bytes >= saved.reused_bytes
    assert "405 kB reused" in call("watch", tmp_path, "--steps", 0).out.splitlines()[1]


def test_a_look_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    watch, heads, parse = RunWatch(tmp_path), [], _core.parse_index_head

    def note(content: bytes, name: str) -> _core.Index:
        heads.append(name)
        return parse(content, name)

    monkeypatch.setattr(_core, "parse_index_head", note)
    watch.look()
    assert len(heads) == 2
    assert changes(watch) == [] and len(heads) == 2
    save(tmp_path, 3, branch="keep")
    assert changes(watch) == [("landed", 3)] and [name for name in heads[2:] if "step-3" not in name] == []


def test_a_run_that_cannot_be_listed_for_a_while_loses_no_step(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    watch = RunWatch(tmp_path / "run")
    assert changes(watch) == [("found", 1)]
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        watch.look()
    (tmp_path / "away").rename(tmp_path / "run")
    save(tmp_path / "run", 2)
    assert changes(watch) == [("landed", 2)]


def test_the_command_ends(tmp_path: Path) -> None:
    missing = call("watch", tmp_path / "run", "--steps", 0)
    assert missing.code == UNREADABLE and "No such file or directory" in missing.err
    assert call("watch", tmp_path, "--steps", 0, "--step-pattern", "x").code == WRONG_USAGE
    assert call("watch", tmp_path, "--interval", 0).code == WRONG_USAGE
    with watching(tmp_path / "run") as process:
        process.send_signal(signal.SIGINT)
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
        assert process.wait() == FINE
