"""Saves that write only what has changed: what they write and link, and that each step stands alone."""

import errno
import hashlib
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, load, mixed_state, save, save_of_run

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint import SaveResult
from torchtitan_ext.errors import CheckpointFailedError, WrongValueError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.checkpoint_files import sharing_save
from torchtitan_ext.storage.commit.leftovers import find_dead_files
from torchtitan_ext.storage.inspect.verify import is_whole, verify
from torchtitan_ext.storage.native import shared_files
from torchtitan_ext.storage.native.shared_files import MAX_SHARED_FILES


def random_weights(num: int, rows: int = 64) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.randn(rows, 256) for number in range(num)}


def lora_state(step: int, base: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**base, "lora": torch.full((64, 256), float(step)), "step": step}


def save_step(run: Path, step: int, state: dict[str, Any], **options: Any) -> SaveResult:
    return tte.save(state, run / f"step-{step}", no_dist=True, **{"reuse": "latest", **options})


def check_step(path: Path, state: dict[str, Any]) -> None:
    """By ours, with all checksums, by stock, and by ``verify``."""
    assert differences(load(blank(state), FileReader(path, "all"), tte.LoadPlanner()), state) == []
    assert differences(load(blank(state), dcp.FileSystemReader(path), dcp.DefaultLoadPlanner()), state) == []
    verdict = verify(path, is_deep=True)
    assert not verdict.damages and not verdict.unproved and is_whole(path)
    assert find_dead_files(path, None) == []


def disk_bytes(*paths: Path) -> int:
    """Of data files; a file with several names counts once."""
    files = [file.stat() for path in paths for file in path.glob("*.distcp")]
    return sum({status.st_ino: status.st_size for status in files}.values())


def contents(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def shared_in(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.distcp") if file.stat().st_nlink > 1}


def tensor_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_from_the_second_save_on_only_what_changes_is_written(tmp_path: Path) -> None:
    base = random_weights(50)
    states = {step: lora_state(step, base) for step in range(1, 7)}
    changed = states[1]["lora"].nbytes
    assert tensor_bytes(base) == 50 * changed
    for step, state in states.items():
        before = disk_bytes(*tmp_path.glob("step-*"))
        result = save_step(tmp_path, step, state)
        grown = disk_bytes(*tmp_path.glob("step-*")) - before
        assert result.num_bytes == grown and result.not_reused == ""
        if step > 1:
            assert grown <= 1.1 * changed and 50 * changed < result.reused_bytes < 50.5 * changed
    for step, state in states.items():
        check_step(tmp_path / f"step-{step}", state)


@pytest.mark.parametrize("planner", [tte.SavePlanner, dcp.DefaultSavePlanner])
def test_every_kind_of_tensor_is_found_again(tmp_path: Path, planner: Any) -> None:
    state = mixed_state()
    save(state, FileWriter(tmp_path / "step-1", reuse="latest"), planner())
    save(state, FileWriter(tmp_path / "step-2", reuse="latest"), planner())
    check_step(tmp_path / "step-2", state)
    (shared,) = shared_in(tmp_path / "step-2")
    own = [file for file in (tmp_path / "step-2").glob("*.distcp") if file.name != shared]
    index = _core.parse_index((tmp_path / "step-2" / ".tte_index").read_bytes(), "index")
    written = {record.fqn for file in own for record in _core.parse_records(index.files[file.name])}
    plain = {fqn for fqn, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 0}
    assert not written & plain


@pytest.mark.parametrize("gone", range(1, 6))
def test_any_step_may_go(tmp_path: Path, gone: int) -> None:
    base = random_weights(6)
    states = {step: lora_state(step, base) for step in range(1, 6)}
    for step, state in states.items():
        save_step(tmp_path, step, state)
    shutil.rmtree(tmp_path / f"step-{gone}")
    for step in states.keys() - {gone}:
        check_step(tmp_path / f"step-{step}", states[step])


@pytest.mark.parametrize("over", [1, 2, 3])
@pytest.mark.filterwarnings("ignore")
def test_a_save_over_a_step_changes_no_other(tmp_path: Path, over: int) -> None:
    base = random_weights(6)
    states = {step: lora_state(step, base) for step in range(1, 4)}
    for step, state in states.items():
        save_step(tmp_path, step, state)
    before = {step: contents(tmp_path / f"step-{step}") for step in states}
    other = lora_state(9, random_weights(6))
    save(other, dcp.FileSystemWriter(tmp_path / f"step-{over}"), dcp.DefaultSavePlanner())
    for step in states.keys() - {over}:
        assert contents(tmp_path / f"step-{step}") == before[step]
        check_step(tmp_path / f"step-{step}", states[step])
    path = tmp_path / f"step-{over}"
    assert differences(load(blank(other), dcp.FileSystemReader(path), dcp.DefaultLoadPlanner()), other) == []
    save_step(tmp_path, over, states[over], reuse=tmp_path / f"step-{over % 3 + 1}")
    for step, state in states.items():
        check_step(tmp_path / f"step-{step}", state)


def test_what_stays_is_written_once_more_apart_from_what_changes(tmp_path: Path) -> None:
    """A file of which most has changed is not linked; the rest of it is grouped, and linked from then on."""
    frozen, trained = random_weights(4), random_weights(12)
    written = []
    for step in range(1, 5):
        state = frozen | {f"trained.{fqn}": tensor + step for fqn, tensor in trained.items()}
        written.append(save_step(tmp_path, step, state).num_bytes)
        check_step(tmp_path / f"step-{step}", state)
    least = tensor_bytes(trained)
    assert written[1] > 1.3 * least and max(written[2:]) < 1.1 * least
    (kept,) = shared_in(tmp_path / "step-4")
    assert kept.endswith(".1.distcp") and kept in shared_in(tmp_path / "step-2")


def test_a_long_chain_gathers_neither_bytes_nor_files(tmp_path: Path) -> None:
    chance = random.Random(0)
    state: dict[str, Any] = random_weights(40, rows=4)
    for step in range(1, 121):
        for fqn in chance.sample(sorted(state), 2):
            state[fqn] = torch.randn(4, 256)
        save_of_run({**state, "step": step}, tmp_path / f"step-{step}", no_dist=True, keep=2, reuse="latest")
        names = list((tmp_path / f"step-{step}").glob("*.distcp"))
        assert len(names) <= MAX_SHARED_FILES + 2
        assert disk_bytes(tmp_path / f"step-{step}") <= 2.2 * tensor_bytes(state) + 10_000
    check_step(tmp_path / "step-120", {**state, "step": 120})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-119", "step-120"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_without_links_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    base = random_weights(6)
    save_step(tmp_path, 1, lora_state(1, base))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(UserWarning, match=f"what has not changed is written again: .* {os.strerror(code)}"):
        result = save_step(tmp_path, 2, lora_state(2, base))
    assert os.strerror(code) in result.not_reused and result.reused_bytes == 0
    assert result.num_bytes > tensor_bytes(base)
    assert shared_in(tmp_path / "step-2") == set()
    check_step(tmp_path / "step-2", lora_state(2, base))
    monkeypatch.undo()
    assert save_step(tmp_path, 3, lora_state(3, base)).not_reused == ""
    check_step(tmp_path / "step-3", lora_state(3, base))


def _no_fingerprints(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1"))


def _stock(run: Path, state: dict[str, Any]) -> None:
    save(state, dcp.FileSystemWriter(run / "step-1"))


def _nothing(run: Path, state: dict[str, Any]) -> None:
    pass


def _damaged_index(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1", fingerprints=True))
    index = run / "step-1" / ".tte_index"
    index.write_bytes(index.read_bytes()[:-9])


def _damaged_footer(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1", fingerprints=True))
    (file,) = (run / "step-1").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


def _cut_file(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1", fingerprints=True))
    (file,) = (run / "step-1").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)


def _lost_file(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1", fingerprints=True))
    (file,) = (run / "step-1").glob("*.distcp")
    file.unlink()


def _symbolic_link(run: Path, state: dict[str, Any]) -> None:
    save(state, FileWriter(run / "step-1", fingerprints=True))
    (file,) = (run / "step-1").glob("*.distcp")
    file.rename(run / "elsewhere")
    file.symlink_to(run / "elsewhere")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_no_fingerprints, "was saved without fingerprints"),
        (_stock, "has no index of ours"),
        (_nothing, "No such file"),
        (_damaged_index, "expected|has no digest|ends too early"),
        (_damaged_footer, "is not the file that its index describes"),
        (_cut_file, "is not the file that its index describes"),
        (_lost_file, "cannot be shared: No such file"),
        (_symbolic_link, "cannot be shared: |is not the file"),
    ],
)
def test_what_cannot_be_reused_is_written_and_said(tmp_path: Path, make: Any, reason: str) -> None:
    state = {**random_weights(4), "step": 1}
    make(tmp_path, state)
    with pytest.warns(UserWarning, match=f"what has not changed is written again: .*({reason})"):
        result = save_step(tmp_path, 2, state, reuse=tmp_path / "step-1")
    assert result.reused_bytes == 0 and result.num_bytes > 4 * 64 * 256 * 4
    check_step(tmp_path / "step-2", state)
    assert not any(sharing_save(name) and name.endswith(".0.distcp") for name in os.listdir(tmp_path / "step-2"))


def test_the_first_save_of_a_run_says_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = save_step(tmp_path, 1, {"w": torch.ones(3)})
    assert result.not_reused == "" and result.reused_bytes == 0


def test_a_step_that_goes_while_it_is_read_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**random_weights(4), "step": 1}
    save_step(tmp_path, 1, state)
    find = shared_files._worth_sharing

    def find_too_late(*args: Any) -> list[str]:
        shutil.rmtree(tmp_path / "step-1")
        return find(*args)

    monkeypatch.setattr(shared_files, "_worth_sharing", find_too_late)
    with pytest.warns(UserWarning, match="cannot be shared: No such file"):
        save_step(tmp_path, 2, state)
    check_step(tmp_path / "step-2", state)


def test_a_save_in_place_shares_nothing(tmp_path: Path) -> None:
    state = {**random_weights(4), "step": 1}
    save_step(tmp_path, 1, state)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="written again: .*step-2 is written in place"):
        save_step(tmp_path, 2, state)
    check_step(tmp_path / "step-2", state)
    assert save_step(tmp_path, 3, state).reused_bytes > 0  # what was saved in place can be shared
    check_step(tmp_path / "step-3", state)
    check_step(tmp_path / "step-2", state)


@pytest.mark.filterwarnings("ignore:.*overwritten")
def test_a_save_over_a_step_with_shared_files_in_place_leaves_none_of_them(tmp_path: Path) -> None:
    state = {**random_weights(4), "step": 1}
    for step in (1, 2):
        save_step(tmp_path, step, state)
    (tmp_path / "step-2" / "config.json").write_text("{}")
    save({"w": torch.ones(3)}, FileWriter(tmp_path / "step-2"))
    assert sum(name.endswith(".distcp") for name in os.listdir(tmp_path / "step-2")) == 1
    check_step(tmp_path / "step-1", state)


@pytest.mark.filterwarnings("ignore:.*overwritten")
def test_a_checkpoint_may_be_saved_over_and_over_and_share_with_itself(tmp_path: Path) -> None:
    base = random_weights(6)
    for step in range(1, 5):
        options: dict[str, Any] = {"fingerprints": True} if step == 1 else {"reuse": tmp_path / "last"}
        result = tte.save(lora_state(step, base), tmp_path / "last", no_dist=True, **options)
        assert (result.reused_bytes > 0) == (step > 1)
        check_step(tmp_path / "last", lora_state(step, base))
        assert os.listdir(tmp_path) == ["last"]
        assert all(file.stat().st_nlink == 1 for file in (tmp_path / "last").iterdir())


def test_values_are_written_always(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, {"w": torch.ones(3000), "names": ["a", "b"]})
    index = _core.parse_index((tmp_path / "step-2" / ".tte_index").read_bytes(), "index")
    own = [file for file in index.files.values() if file.save_id is None]
    assert [record.fqn for file in own for record in _core.parse_records(file)] == ["names"]


@pytest.mark.parametrize("stock_metadata", [True, False])
def test_without_stocks_metadata(tmp_path: Path, stock_metadata: bool) -> None:
    base = random_weights(6)
    for step in (1, 2, 3):
        writer = FileWriter(tmp_path / f"step-{step}", reuse="latest", stock_metadata=stock_metadata)
        save(lora_state(step, base), writer)
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step}"
        assert find_dead_files(path, None) == [] and is_whole(path) and not verify(path, is_deep=True).damages
        loaded = load(blank(lora_state(0, base)), FileReader(path, "all"), tte.LoadPlanner())
        assert differences(loaded, lora_state(step, base)) == []


def test_without_the_index_files_are_verified_by_their_own_footers(tmp_path: Path) -> None:
    base = random_weights(6)
    for step in (1, 2):
        save_step(tmp_path, step, lora_state(step, base))
    path = tmp_path / "step-2"
    (path / ".tte_index").unlink()
    with pytest.warns(UserWarning, match="has no index"):
        loaded = load(blank(lora_state(0, base)), FileReader(path, "all"), tte.LoadPlanner())
    assert differences(loaded, lora_state(2, base)) == []
    assert [damage.kind for damage in verify(path, is_deep=True).damages] == ["lost"]
    (shared,) = shared_in(path)
    (path / shared).unlink()
    shutil.copy(next(path.glob("*.distcp")), path / shared)
    with (
        pytest.warns(UserWarning, match="has no index"),
        pytest.raises(CheckpointFailedError, match=r"\.0\.distcp: byte"),
    ):
        tte.load(blank(lora_state(0, base)), path, no_dist=True)


def test_a_shared_file_of_another_save_is_found(tmp_path: Path) -> None:
    state = {**random_weights(4), "step": 1}
    for run in ("one", "other"):
        for step in (1, 2):
            save_step(tmp_path / run, step, state)
    path = tmp_path / "one" / "step-2"
    (shared,) = shared_in(path)
    (other,) = shared_in(tmp_path / "other" / "step-2")
    (path / shared).unlink()
    shutil.copy(tmp_path / "other" / "step-2" / other, path / shared)
    (damage,) = verify(path).damages
    assert damage.file == shared and "belongs to another save" in damage.what
    with pytest.raises(CheckpointFailedError, match="belongs to another save"):
        tte.load(blank(state), path, no_dist=True)


def test_flipped_bytes_of_a_shared_file_are_found_in_each_step(tmp_path: Path) -> None:
    base = random_weights(6)
    for step in (1, 2, 3):
        save_step(tmp_path, step, lora_state(step, base))
    (shared,) = shared_in(tmp_path / "step-3")
    with (tmp_path / "step-3" / shared).open("r+b") as stream:
        stream.seek(200_000)
        stream.write(b"\xff" * 8)
    for step in (1, 2, 3):
        (damage,) = verify(tmp_path / f"step-{step}", is_deep=True).damages
        assert damage.kind == "checksum" and "w0[" in damage.what


def test_a_tensor_that_grows_keeps_its_old_rows_only_as_a_chunk(tmp_path: Path) -> None:
    """Equal bytes are reused for equal boxes of equal dtype alone."""
    save_step(tmp_path, 1, {"w": torch.zeros(8, 4), "v": torch.zeros(32), "d": torch.zeros(9)})
    changed = {"w": torch.zeros(4, 8), "v": torch.zeros(31), "d": torch.zeros(9, dtype=torch.int32)}
    assert save_step(tmp_path, 2, changed).reused_bytes == 0
    check_step(tmp_path / "step-2", changed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reuse": "latest", "storage_writer": FileWriter("somewhere")}, r"FileWriter\(path, reuse=...\)"),
        ({"reuse": "s3://bucket/step-1"}, "expected both on disks or both in a store"),
    ],
)
def test_where_nothing_can_be_linked_the_argument_is_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(WrongValueError, match=text):
        tte.save({"w": torch.ones(3)}, tmp_path / "step-1", no_dist=True, **options)
    with pytest.raises(TypeError, match='reuse: got 3|expected a checkpoint or "latest"'):
        tte.save({"w": torch.ones(3)}, tmp_path / "step-1", no_dist=True, reuse=3)


def test_asynchronous_saves_share_too(tmp_path: Path) -> None:
    base = random_weights(6)
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step}"
        result = tte.async_save(lora_state(step, base), path, reuse="latest").result()
        assert (result.reused_bytes > 0) == (step > 1) and result.not_reused == ""
        check_step(path, lora_state(step, base))


def test_names_of_steps_may_have_another_pattern(tmp_path: Path) -> None:
    base = random_weights(6)
    for step in (1, 2):
        result = tte.save(
            lora_state(step, base), tmp_path / f"ckpt-{step}", no_dist=True, reuse="latest", step_pattern="ckpt-{step}"
        )
    assert result.reused_bytes > 0


def test_without_its_metadata_a_checkpoint_is_no_leftover(tmp_path: Path) -> None:
    """Its files have ids in their names, as those of a save in place that died have."""
    base = random_weights(6)
    for step in (1, 2):
        save_step(tmp_path, step, lora_state(step, base))
        (tmp_path / f"step-{step}" / ".metadata").rename(tmp_path / f"metadata-{step}")
        assert find_dead_files(tmp_path / f"step-{step}", None) == []
    save_step(tmp_path, 3, lora_state(3, base))
    for step in (1, 2):
        (tmp_path / f"metadata-{step}").rename(tmp_path / f"step-{step}" / ".metadata")
        check_step(tmp_path / f"step-{step}", lora_state(step, base))
