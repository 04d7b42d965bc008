"""``torchtitan-ext ls`` and ``gc``: what lies in a run, who saves there, and what goes."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_processes
from calls import call, call_importing, make
from checkpoints import of_single_rank, shared_steps

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.commit import branch
from torchtitan_ext.storage.runs.listing import list_steps

BEGIN_SAVE = """
import os, sys
from pathlib import Path
from torchtitan_ext.storage.commit.commit import begin_save
save = begin_save(Path(sys.argv[1]), sys.argv[2] * 32)
(save.place.directory / save.place.data_name("__0_")).write_bytes(bytes(5000))
print("begun", flush=True)
sys.stdin.read()
os._exit(9)
"""


@contextmanager
def saving(path: Path, digit: str = "a") -> Iterator[None]:
    """Another process saves there; dies in the middle of it afterwards."""
    command = ["-c", BEGIN_SAVE, path, digit]
    process = warm_processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    try:
        yield
    finally:
        process.communicate("")


def die_saving(path: Path, digit: str = "a") -> None:
    with saving(path, digit):
        pass


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10, 15, 20):
        make(tmp_path / f"step-{step}", "ours")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-12" / "__0_0.distcp").write_bytes(bytes(1000))
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def steps(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.startswith("step-"))


def test_steps_are_listed(run: Path) -> None:
    done = call("ls", run, "--json")
    assert (done.code, done.err) == (FINE, "")
    rows = {step["step"]: step for step in done.json["steps"]}
    assert list(rows) == [5, 10, 12, 15, 20] and done.json["leftovers"] == []
    assert (rows[20]["state"], rows[20]["world_size"], rows[20]["format"]) == ("finished", 1, "dcp")
    assert abs(rows[20]["finished_at"] - (run / "step-20" / ".metadata").stat().st_mtime) < 1
    assert (rows[12]["state"], rows[12]["num_bytes"], rows[12]["finished_at"]) == ("not finished", 1000, None)
    shown = call("ls", run).out.splitlines()
    assert len(shown) == 6 and shown[3].split()[:5] == ["12", "not", "finished", "1", "kB"]


def test_other_kinds_of_steps_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path / "step-1", "stock")
    make(tmp_path / "step-2", "ours without .metadata")
    make(tmp_path / "step-3", "safetensors directory")
    of_single_rank(tmp_path / "step-4", {"w": torch.ones(3)})
    states = [(step["state"], step["format"]) for step in call("ls", tmp_path, "--json").json["steps"]]
    assert states == [("finished", "dcp"), ("finished", "dcp"), ("other", "safetensors"), ("other", "dcp")]
    assert call("gc", tmp_path, "--keep", 1, "--yes").code == FINE
    assert steps(tmp_path) == ["step-2", "step-3", "step-4"]


def test_a_run_without_steps(tmp_path: Path) -> None:
    assert call("ls", tmp_path).out == f"{tmp_path} has no step\n"
    assert call("ls", tmp_path / "nothing").code == UNREADABLE
    assert call("gc", tmp_path / "nothing", "--keep", 1).code == UNREADABLE
    assert call("gc", tmp_path, "--keep", 0).code == WRONG_USAGE
    assert call("gc", tmp_path).code == WRONG_USAGE


def test_a_checkpoint_is_no_run(run: Path) -> None:
    for command in (("ls",), ("latest",), ("gc", "--keep", 1)):
        done = call(*command, run / "step-5")
        assert done.code == UNREADABLE and "step-5 is a checkpoint itself, expected the directory of a run" in done.err


def test_who_saves_is_named(run: Path) -> None:
    with saving(run / "step-30"), saving(run / "step-5", "b"):
        rows = {step["step"]: step for step in call("ls", run, "--json").json["steps"]}
        assert rows[30]["state"] == "saving" and rows[30]["saver"].startswith("process ")
        assert rows[5]["state"] == "finished" and rows[5]["saver"].startswith("process ")
        assert call("ls", run, "--json").json["leftovers"] == []
        done = call("gc", run, "--keep", 1, "--yes", "--json")
        assert done.code == FINE and done.json["leftovers"] == []
        assert [step["step"] for step in done.json["removed"]] == [10, 12, 15]
        assert steps(run) == ["step-20", "step-5"]
    assert len(call("ls", run, "--json").json["leftovers"]) == 4


def test_nothing_goes_without_yes(run: Path) -> None:
    before = sorted(str(path) for path in run.rglob("*"))
    done = call("gc", run, "--keep", 2, "--json")
    assert done.code == FINE and not done.json["is_done"]
    assert [step["step"] for step in done.json["kept"]] == [15, 20]
    assert [step["step"] for step in done.json["removed"]] == [5, 10, 12]
    files = [path for number in (5, 10, 12) for path in (run / f"step-{number}").iterdir()]
    assert done.json["freed_bytes"] == sum(path.stat().st_size for path in files)
    shown = call("gc", run, "--keep", 2).out
    assert shown.count("goes") == 3 and "would be freed: --yes does it" in shown
    assert sorted(str(path) for path in run.rglob("*")) == before


def test_old_steps_go(run: Path) -> None:
    done = call("gc", run, "--keep", 2, "--yes")
    assert done.code == FINE and done.out.splitlines()[-1].startswith("freed ")
    assert steps(run) == ["step-15", "step-20"] and (run / "notes.txt").exists()
    assert call("gc", run, "--keep", 2, "--yes").out.splitlines()[-1] == "freed 0 B"


def test_a_damaged_step_does_not_count(run: Path) -> None:
    (run / "step-20" / "__0_0.distcp").unlink()
    assert [step["step"] for step in call("gc", run, "--keep", 1, "--json").json["kept"]] == [15, 20]


@pytest.mark.parametrize("stuck", ["__0_0.distcp", ".tte_index"])
def test_what_could_not_be_removed_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, stuck: str) -> None:
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    done = call("gc", run, "--keep", 3, "--yes", "--json")
    (place,) = done.json["not_removed"]
    assert done.code == DIFFERS and "Permission denied" in done.err
    assert (Path(place) / stuck).is_file() and "step-5" not in os.listdir(run)
    again = call("gc", run, "--keep", 3, "--yes")
    assert again.code == DIFFERS and f"not removed: {place}\nfreed 0 B\n" in again.out
    monkeypatch.undo()
    assert call("gc", run, "--keep", 3, "--yes").code == FINE and not Path(place).exists()


def test_files_of_others_stay(run: Path) -> None:
    (run / "step-5" / "config.json").write_text("{}")
    done = call("gc", run, "--keep", 1, "--yes", "--json")
    assert done.code == FINE and done.json["not_removed"] == []
    assert steps(run) == ["step-20", "step-5"] and os.listdir(run / "step-5") == ["config.json"]
    assert [step["step"] for step in call("gc", run, "--keep", 1, "--json").json["removed"]] == []


def test_leftovers_of_dead_saves_go(run: Path) -> None:
    (run / "step-20" / "config.json").write_text("{}")
    die_saving(run / "step-20", "b")  # in place, as a file of others is there
    die_saving(run / "step-25")  # staged; it has removed the other's lock
    found = call("ls", run, "--json").json["leftovers"]
    stage, dead_file = f".tte-{'a' * 32}", f"__0_{'b' * 32}.distcp"
    names = {Path(leftover["path"]).name for leftover in found}
    assert {stage, dead_file} < names and len(found) == 3
    assert "left by dead saves, " in call("ls", run).out
    done = call("gc", run, "--keep", 9, "--yes", "--json")
    assert done.code == FINE and done.json["removed"] == [] and len(done.json["leftovers"]) == 3
    assert call("ls", run, "--json").json["leftovers"] == []
    assert not (run / stage).exists() and not (run / "step-20" / dead_file).exists()
    assert call("verify", run, "--deep").code == FINE


@pytest.mark.parametrize("command", [("ls",), ("gc", "--keep", "1", "--yes"), ("latest",)])
def test_no_torch_is_imported(run: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    done, imported = call_importing({"torch", "numpy"}, name, run, *options)
    assert done.code == FINE and imported == set()


def test_names_that_no_save_gives_are_no_steps(run: Path) -> None:
    (run / "step-007").mkdir()
    assert [row["step"] for row in call("ls", run, "--json").json["steps"]] == [5, 10, 12, 15, 20]
    assert call("gc", run, "--keep", 1, "--yes").code == FINE
    assert steps(run) == ["step-007", "step-20"]


def test_links_to_steps_elsewhere_stay(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = make(tmp_path_factory.mktemp("archive") / "kept", "ours")
    names = sorted(os.listdir(elsewhere))
    (run / "step-1").symlink_to(elsewhere)
    assert call("gc", run, "--keep", 1, "--yes").code == FINE
    assert steps(run) == ["step-1", "step-20"] and sorted(os.listdir(elsewhere)) == names


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A run as a Trainer with sharded FSDP states leaves it: several checkpoints in each step."""
    for name in ("checkpoint-3/pytorch_model_fsdp_0", "checkpoint-3/optimizer_0", "checkpoint-12/pytorch_model_fsdp_0"):
        make(tmp_path / name, "ours", {"w": torch.ones(3)})
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    return tmp_path


def test_folders_of_several_checkpoints_are_listed(trainer: Path) -> None:
    rows = call("ls", trainer, "--json").json["steps"]
    assert [(row["step"], row["state"], row["checkpoints"]) for row in rows] == [
        (3, "folder", ["optimizer_0", "pytorch_model_fsdp_0"]),
        (12, "folder", ["pytorch_model_fsdp_0"]),
    ]
    assert "folder (optimizer_0, pytorch_model_fsdp_0)" in call("ls", trainer).out
    step = trainer / "checkpoint-3"
    for command in ("ls", "inspect"):
        done = call(command, step)
        assert done.code == FINE and [line.split()[:2] for line in done.out.splitlines()[-2:]] == [
            ["optimizer_0", "DCP"],
            ["pytorch_model_fsdp_0", "DCP"],
        ]
    assert call("ls", step, "--json").json["checkpoints"] == ["optimizer_0", "pytorch_model_fsdp_0"]
    assert [row["name"] for row in call("inspect", step, "--json").json["checkpoints"]] == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
    ]
    done = call("latest", trainer)
    assert done.code == UNREADABLE and "step 12 is a folder of several checkpoints" in done.err
    rows = call("verify", trainer, "--json").json["steps"]
    assert [(row["step"], Path(row["path"]).name, row["is_whole"]) for row in rows] == [
        (3, "optimizer_0", True),
        (3, "pytorch_model_fsdp_0", True),
        (12, "pytorch_model_fsdp_0", True),
    ]
    before = sorted(trainer.rglob("*"))
    assert call("gc", trainer, "--keep", 1, "--yes").code == FINE and sorted(trainer.rglob("*")) == before


def test_steps_of_other_names(tmp_path: Path) -> None:
    for number in (5, 10, 20):
        make(tmp_path / f"v{number}", "ours", {"w": torch.ones(3)})
    pattern = ("--step-pattern", "v{step}")
    assert [row["step"] for row in call("ls", tmp_path, *pattern, "--json").json["steps"]] == [5, 10, 20]
    assert call("latest", tmp_path, *pattern).out == f"{tmp_path}/v20\n"
    assert call("latest", tmp_path, *pattern, "--json").json["step"] == 20
    assert [row["step"] for row in call("verify", tmp_path, *pattern, "--json").json["steps"]] == [5, 10, 20]
    assert call("gc", tmp_path, "--keep", 2, "--yes", *pattern).code == FINE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v10", "v20"]
    for number in (10, 20):
        (tmp_path / f"v{number}").rename(tmp_path / f"global_step_{number}")
    assert call("latest", tmp_path).out == f"{tmp_path}/global_step_20\n"
    for command in (("ls",), ("latest",), ("verify",), ("gc", "--keep", 1)):
        assert call(*command, tmp_path, "--step-pattern", "v").code == WRONG_USAGE


def test_files_that_steps_share_are_told_and_not_counted_as_freed(tmp_path: Path) -> None:
    shared_steps(tmp_path)
    listed = call("ls", tmp_path, "--json").json
    assert listed["disk_bytes"] < 0.65 * sum(step["num_bytes"] for step in listed["steps"])
    assert "steps share files: " in call("ls", tmp_path).out
    assert " shared with earlier saves)" in call("inspect", tmp_path / "step-3").out
    files = call("inspect", tmp_path / "step-3", "--json").json["files"]
    assert [file["save_id"] is None for file in files].count(True) == 1
    freed = call("gc", tmp_path, "--keep", "1", "--json").json["freed_bytes"]
    own = [path.stat() for step in (1, 2) for path in (tmp_path / f"step-{step}").iterdir()]
    assert freed == sum(status.st_size for status in own if status.st_nlink == 1) > 0
    done = call("gc", tmp_path, "--keep", "1", "--yes", "--json").json
    assert done["freed_bytes"] == freed and steps(tmp_path) == ["step-3"]
    assert call("ls", tmp_path, "--json").json["disk_bytes"] == listed["disk_bytes"] - freed
    assert call("verify", tmp_path, "--deep").code == FINE


@pytest.mark.parametrize("way", ["save", "async_save", "tried again", "dcp.save", "stock"])
def test_seconds_are_those_of_the_phases(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, path = {"w": torch.ones(9)}, tmp_path / "step-1"
    seconds: dict[str, float] = {}
    if way == "save":
        seconds = dict(tte.save(state, path, no_dist=True).seconds)
    elif way == "async_save":
        seconds = dict(tte.async_save(state, path).result().seconds)
    elif way == "tried again":
        refuse_once(monkeypatch)
        with tte.CheckpointManager(tmp_path, retries=1) as manager:
            manager.save(state, 1)
            result = manager.wait()
        assert result is not None and "retry" in result.seconds
        seconds = dict(result.seconds)
    else:
        make(path, "stock" if way == "stock" else "ours", state)
    (step,) = list_steps(tmp_path)
    noted = step.seconds
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
    tte.save({"w": torch.ones(9)}, tmp_path / "step-1", no_dist=True)
    path = tmp_path / "step-1" / ".tte_index"
    index = _core.parse_index(path.read_bytes(), "index")
    notes = [("world_size", "1"), ("seconds", text), ("abandoned", f"{text}:x y")]
    sealed = _core.encode_index(
        index.save_id, index.metadata_bytes, index.metadata_digest, notes, list(index.files.values())
    )
    path.write_bytes(sealed)
    done = call("ls", tmp_path, "--json")
    known = {"write": 1.0} if "00001" in text else {}
    (row,) = done.json["steps"]
    assert done.code == FINE and (row["seconds"], row["left_behind"]) == (known, [])
    loaded = {"w": torch.zeros(9)}
    tte.load(loaded, tmp_path / "step-1", no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(9))


def test_a_run_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch, "_last_names", {})
    state = {"w": torch.zeros(9)}
    for step in (10, 20, 30):
        tte.save(state, tmp_path / f"step-{step}", no_dist=True)
    tte.load(state, tmp_path, step=10, no_dist=True)
    with pytest.warns(UserWarning):
        tte.save(state, tmp_path / "step-11", no_dist=True)
    step = list_steps(tmp_path)[1]
    assert (step.step, step.parent, step.left_behind) == (11, "step-10", (20, 30))


def test_bytes_that_a_save_of_0_2_reused() -> None:
    first, second = list_steps(Path(__file__).parents[1] / "data" / "saved_by_0_2" / "linked")
    assert first.reused_bytes == 0 and second.reused_bytes > 0
