"""Steps of a run: the latest, the last good one with what was skipped, and which of them stay."""

import os
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, save, save_of_run

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, NoCheckpointError
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.commit import commit, save_lock
from torchtitan_ext.storage.commit.steps import find_steps
from torchtitan_ext.storage.inspect.verify import find_damage, is_whole


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000, 200), float(step)), "b": torch.full((7,), float(step)), "step": step}


def save_step(run: Path, step: int, **options: Any) -> None:
    path = run / f"step-{step}"
    save_of_run(state_of(step), path, storage_writer=FileWriter(path, sync=False), no_dist=True, **options)


def loaded_step(run: Path, step: Any) -> int:
    loaded = blank(state_of(0))
    tte.load(loaded, run, step=step, no_dist=True)
    assert differences(loaded, state_of(loaded["step"])) == []
    return int(loaded["step"])


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10, 20):
        save_step(tmp_path, step)
    (tmp_path / "step-40").mkdir()  # a save that has not finished
    (tmp_path / "step-40" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-50").touch()
    return tmp_path


def test_the_latest_has_finished(run: Path) -> None:
    assert tte.latest(run) == run / "step-20"
    assert loaded_step(run, "latest") == 20 and loaded_step(run, 5) == 5
    assert tte.latest(run / "nothing") is None
    assert find_steps(run) == {5: True, 10: True, 20: True, 40: False}


def test_a_step_that_is_not_there_is_named(run: Path) -> None:
    with pytest.raises(
        NoCheckpointError, match="no finished checkpoint of step 7: it has steps 5, 10, 20; not finished are 40"
    ):
        loaded_step(run, 7)
    with pytest.raises(NoCheckpointError, match="no finished checkpoint of step 40"):
        loaded_step(run, 40)
    with pytest.raises(NoCheckpointError, match="has no finished checkpoint: it has none"):
        loaded_step(run / "nothing", "latest")
    with pytest.raises(NoCheckpointError, match="has no good checkpoint: it has no step at all"):
        loaded_step(run / "nothing", "last-good")


DAMAGES = {
    "a bit of data": lambda path: flip(path / "__0_0.distcp", 1_300_000),
    "a bit of the last record": lambda path: flip(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 400),
    "a bit of the footer": lambda path: flip(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 60),
    "a bit of the index": lambda path: flip(path / ".tte_index", 40),
    "a bit of the metadata": lambda path: flip(path / ".metadata", 300),
    "a cut file": lambda path: os.truncate(path / "__0_0.distcp", 100_000),
    "a lost file": lambda path: (path / "__0_0.distcp").unlink(),
    "another step's file": lambda path: shutil.copy(path.parent / "step-10" / "__0_0.distcp", path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_last_good_one_is_loaded_and_says_what_was_skipped(run: Path, damage: str) -> None:
    DAMAGES[damage](run / "step-20")
    flip(run / "step-10" / "__0_0.distcp", 500_000)
    reasons = (
        r"step 40: it has no .metadata: its save has not finished; step 20: .*; step 10: .*step-10/__0_0.distcp.*w\["
    )
    with pytest.warns(UserWarning, match=f"step 5 is loaded, 3 newer skipped: {reasons}"):
        assert loaded_step(run, "last-good") == 5
    assert find_damage(run / "step-5") is None


def test_the_last_good_one_is_found_without_its_index(run: Path) -> None:
    for step in (10, 20):
        (run / f"step-{step}" / ".tte_index").unlink()
    flip(run / "step-20" / "__0_0.distcp", 500_000)
    reasons = r"step 40: it has no .metadata: .*; step 20: .*step-20/__0_0.distcp: bytes .* do not match their checksum"
    with pytest.warns(UserWarning, match=f"step 10 is loaded, 2 newer skipped: {reasons}"):
        assert loaded_step(run, "last-good") == 10


def test_none_is_good(run: Path) -> None:
    for step in (5, 10, 20):
        flip(run / f"step-{step}" / "__0_0.distcp", 700_000)
    with pytest.raises(
        NoCheckpointError, match="has no good checkpoint: step 40: .*; step 20: .*; step 10: .*; step 5: "
    ):
        loaded_step(run, "last-good")


def test_stock_checkpoints_are_good_where_their_files_are_long_enough(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state_of(step), dcp.FileSystemWriter(tmp_path / f"step-{step}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is")
        assert loaded_step(tmp_path, "last-good") == 2
    os.truncate(tmp_path / "step-2" / "__0_0.distcp", 2_000_000)
    with pytest.warns(UserWarning, match="ends before its last record"):
        assert loaded_step(tmp_path, "last-good") == 1


def load_last_good(rank: int, world_size: int, run: Path) -> tuple[int, int]:
    loaded = {f"rank_{rank}": torch.zeros(300_000)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tte.load(loaded, run, step="last-good")
    return int(loaded[f"rank_{rank}"][0]), sum("newer skipped" in str(one.message) for one in caught)


def save_steps(rank: int, world_size: int, run: Path) -> None:
    for step in (1, 2, 3):
        tte.save({f"rank_{rank}": torch.full((300_000,), float(step))}, run / f"step-{step}")


def test_all_ranks_verify_and_agree(run_world: Any, tmp_path: Path) -> None:
    run_world(3, save_steps, tmp_path)
    flip(tmp_path / "step-3" / "__2_0.distcp", 500_000)
    assert run_world(3, load_last_good, tmp_path) == [(2, 1), (2, 0), (2, 0)]


def load_last_good_strictly(rank: int, world_size: int, run: Path) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*newer skipped")
        try:
            tte.load({f"rank_{rank}": torch.zeros(300_000)}, run, step="last-good", timeout_seconds=60)
        except CheckpointFailedError as error:
            return str(error)
    return "loaded"


def test_a_warning_of_skipped_steps_that_is_an_error_is_one_on_all_ranks(run_world: Any, tmp_path: Path) -> None:
    run_world(2, save_steps, tmp_path)
    flip(tmp_path / "step-3" / "__1_0.distcp", 500_000)
    first, second = run_world(2, load_last_good_strictly, tmp_path)
    assert first == second
    assert "rank 0: UserWarning" in first and "step 2 is loaded, 1 newer skipped" in first


# ---- retention ----


def steps(run: Path) -> list[int]:
    return sorted(find_steps(run))


def test_so_many_steps_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_step(tmp_path, step, keep=2)
        assert steps(tmp_path) == [number for number in (step - 1, step) if number]
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"]
    future = save_of_run(state_of(6), tmp_path / "step-6", keep=1, is_async=True)
    future.result()
    assert steps(tmp_path) == [6]


class DiskFull(FileWriter):
    """Fails when all else is done, right before the commit."""

    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError("no space left on device")


def test_a_save_in_a_thread_that_fails_removes_no_older_step(run: Path) -> None:
    path = run / "step-60"
    future = save_of_run(state_of(60), path, storage_writer=DiskFull(path), keep=1, is_async=True)
    with pytest.raises(CheckpointFailedError, match="no space left"):
        future.result()
    assert steps(run) == [5, 10, 20, 40] and loaded_step(run, "latest") == 20


def test_a_save_in_a_thread_removes_steps_of_its_own_run_whatever_the_working_directory_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "other"):
        for step in (1, 2):
            save_step(tmp_path / name / "run", step)
    has_moved, finish = threading.Event(), FileWriter.finish

    def finish_later(writer: FileWriter, metadata: Any, results: Any) -> None:
        assert has_moved.wait(60)
        finish(writer, metadata, results)

    monkeypatch.setattr(FileWriter, "finish", finish_later)
    monkeypatch.chdir(tmp_path / "own")
    future = save_of_run(state_of(3), "run/step-3", keep=1, is_async=True)
    monkeypatch.chdir(tmp_path / "other")
    has_moved.set()
    saved = future.result()
    assert (steps(tmp_path / "own" / "run"), steps(tmp_path / "other" / "run")) == ([3], [1, 2])
    assert saved.path == str(tmp_path / "own" / "run" / "step-3") and "w" in saved.metadata.state_dict_metadata


def test_what_is_not_whole_does_not_count(run: Path) -> None:
    (run / "step-20" / "__0_0.distcp").unlink()
    assert not is_whole(run / "step-20") and is_whole(run / "step-10")
    save_step(run, 30, keep=2)
    assert steps(run) == [10, 20, 30, 40]


def test_steps_are_counted_from_the_saved_one(run: Path) -> None:
    with pytest.warns(UserWarning, match="the run goes on with step 7, below its step\\(s\\) 10, 20"):
        save_step(run, 7, keep=1)
    assert steps(run) == [7, 40]


def test_files_of_others_stay_in_old_steps(run: Path) -> None:
    (run / "step-5" / "config.json").touch()
    save_step(run, 30, keep=1)
    assert steps(run) == [5, 30, 40] and os.listdir(run / "step-5") == ["config.json"]
    assert tte.latest(run) == run / "step-30"


def test_a_step_that_is_being_saved_stays(run: Path) -> None:
    path = run / "step-10"
    os.rename(path / ".metadata", path / "metadata")
    lock = commit.lock_path(path)
    lock.write_text("{")  # its owner is about to write who he is
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match="step-10 is kept: save: .* is being saved to"),
    ):
        patch.setattr(save_lock, "_stays_untouched", lambda *_: False)
        save_step(run, 30, keep=1)
    assert 10 in steps(run)


def test_what_cannot_be_removed_does_not_make_a_save_fail(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = commit.lock_path(run / "step-10")
    lock.write_text("{")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(save_lock, "_stays_untouched", lambda *_: False)
        warnings.filterwarnings("error", message=".* is kept")
        save_step(run, 30, keep=1)
    assert loaded_step(run, "latest") == 30
    assert "step-10 is kept" in capsys.readouterr().err


def test_bad_steps_are_refused(run: Path) -> None:
    with pytest.raises(TypeError, match="got step='newest', expected a number, 'latest' or 'last-good'"):
        loaded_step(run, "newest")
    with pytest.raises(ValueError, match="got step=3 without a path"):
        tte.load({}, step=3, storage_reader=tte.FileReader(run / "step-5"), no_dist=True)


def test_steps_of_other_names_are_loaded_kept_and_found(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        save_of_run(state_of(step), tmp_path / f"checkpoint-{step}", no_dist=True, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]
    assert tte.latest(tmp_path) == tmp_path / "checkpoint-20"
    assert (
        loaded_step(tmp_path, "latest") == loaded_step(tmp_path, "last-good") == 20 and loaded_step(tmp_path, 10) == 10
    )
    flip(tmp_path / "checkpoint-20" / "__0_0.distcp", 1_300_000)
    with pytest.warns(UserWarning, match="step 10 is loaded, 1 newer skipped"):
        assert loaded_step(tmp_path, "last-good") == 10


def test_a_pattern_says_how_steps_are_named(tmp_path: Path) -> None:
    pattern, loaded = "v{step:03d}", blank(state_of(0))
    for step in (5, 10, 20):
        with tte.CheckpointManager(tmp_path, keep=2, step_pattern=pattern, asynchronous=False) as manager:
            manager.save(state_of(step), step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v010", "v020"]
    assert tte.latest(tmp_path, step_pattern=pattern) == tmp_path / "v020"
    tte.load(loaded, tmp_path, step="latest", step_pattern=pattern, no_dist=True)
    assert loaded["step"] == 20
    with pytest.raises(NoCheckpointError, match="no finished checkpoint of step 5: it has steps 10, 20"):
        tte.load(loaded, tmp_path, step=5, step_pattern=pattern, no_dist=True)
    for wrong, words in ((7, TypeError), ("v", ValueError)):
        with pytest.raises(words, match="step.pattern"):
            tte.load(loaded, tmp_path, step=5, step_pattern=wrong, no_dist=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got step_pattern='v{step}' and no step"):
        tte.load(loaded, tmp_path, step_pattern="v{step}", no_dist=True)


def test_a_run_without_a_finished_step_is_told_what_it_is(tmp_path: Path) -> None:
    save_step(tmp_path / "run", 5)
    words = f"it has none; it is a checkpoint itself: load it without step=, or give its run: {tmp_path}/run"
    with pytest.raises(NoCheckpointError, match=re.escape(words)):
        loaded_step(tmp_path / "run" / "step-5", "latest")
    for name in ("checkpoint-5", "step_5"):
        shutil.copytree(tmp_path / "run" / "step-5", tmp_path / "mixed" / name)
    with pytest.raises(NoCheckpointError, match="named in several ways, choose one: step_pattern='step_{step}' or 'ch"):
        loaded_step(tmp_path / "mixed", "latest")
    shutil.copytree(tmp_path / "run" / "step-5", tmp_path / "trainer" / "checkpoint-3" / "model_0")
    with pytest.raises(NoCheckpointError, match="checkpoint-3 holds checkpoints of its own, .*/checkpoint-3/model_0"):
        loaded_step(tmp_path / "trainer", "latest")
