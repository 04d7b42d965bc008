"""Checkpoints of every format version that has been released: they load, to the bit, and stock loads them too."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import of_single_rank, shared_file, shared_steps
from golden.generate import golden_state, shared_golden_state, small_golden_state
from states import blank, differences, load, save

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointFailedError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.checkpoint_files import sharing_save
from torchtitan_ext.storage.commit.leftovers import find_dead_files, is_checkpoint_name, save_id_of
from torchtitan_ext.storage.inspect.verify import is_whole, verify

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ["version_1"]


@pytest.mark.parametrize("verify", ["auto", "all", "none"])
@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoints_load(version: str, verify: Any) -> None:
    loaded = load(blank(golden_state()), FileReader(GOLDEN / version, verify), tte.LoadPlanner())
    assert differences(loaded, golden_state()) == []


@pytest.mark.parametrize("verify", ["auto", "all", "none"])
def test_the_one_without_metadata_loads(verify: Any) -> None:
    reader = FileReader(GOLDEN / "version_1_index_alone", verify)
    loaded = load(blank(small_golden_state()), reader, tte.LoadPlanner())
    assert differences(loaded, small_golden_state()) == []


@pytest.mark.parametrize("verify", ["auto", "all", "none"])
def test_one_of_a_single_rank_loads(tmp_path: Path, verify: Any) -> None:
    path = of_single_rank(tmp_path / "own", golden_state())
    loaded = blank(golden_state())
    dcp.load(loaded, storage_reader=FileReader(path, verify), planner=tte.LoadPlanner(), no_dist=True)
    assert differences(loaded, golden_state()) == []
    (data,) = path.glob("*.distcp")
    assert [line.name for line in path.glob("__0.tte_index.*")] == [f"__0.tte_index.{save_id_of(data.name)}"]


@pytest.mark.parametrize("verify", ["auto", "all", "none"])
def test_the_one_that_shares_a_file_loads(verify: Any) -> None:
    path = GOLDEN / "version_1_shared"
    shared = [name for name in map(sharing_save, os.listdir(path)) if name is not None]
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    assert [file.save_id and file.save_id.hex() for file in index.files.values()] == [None, *shared] != [None]
    loaded = load(blank(shared_golden_state()), FileReader(path, verify), tte.LoadPlanner())
    assert differences(loaded, shared_golden_state()) == []
    loaded = load(blank(shared_golden_state()), dcp.FileSystemReader(path), dcp.DefaultLoadPlanner())
    assert differences(loaded, shared_golden_state()) == []


def check_shared(path: Path) -> None:
    loaded = load(blank(shared_golden_state()), FileReader(path, "all"), tte.LoadPlanner())
    assert differences(loaded, shared_golden_state()) == []
    verdict = verify(path, is_deep=True)
    assert not verdict.damages and not verdict.unproved and is_whole(path)
    assert find_dead_files(path) == []


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_any_step_that_shares_a_file_may_go(tmp_path: Path, gone: int) -> None:
    steps = shared_steps(tmp_path)
    shutil.rmtree(steps.pop(gone))
    for step in steps:
        check_shared(step)


@pytest.mark.filterwarnings("ignore:.*overwritten")
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_save_over_a_step_with_a_shared_file_leaves_none_of_it(tmp_path: Path, is_in_place: bool) -> None:
    *others, over = shared_steps(tmp_path)
    if is_in_place:
        (over / "config.json").write_text("{}")
    save({"w": torch.ones(3)}, FileWriter(over))
    assert sum(name.endswith(".distcp") for name in os.listdir(over)) == 1
    for step in others:
        check_shared(step)


def test_without_the_index_a_shared_file_is_verified_by_its_own_footer(tmp_path: Path) -> None:
    path = shared_steps(tmp_path)[0]
    (path / ".tte_index").unlink()
    with pytest.warns(UserWarning, match="has no index"):
        loaded = load(blank(shared_golden_state()), FileReader(path, "all"), tte.LoadPlanner())
    assert differences(loaded, shared_golden_state()) == []
    assert [damage.kind for damage in verify(path, is_deep=True).damages] == ["lost"]
    shared = shared_file(path)
    shared.unlink()
    shutil.copy(next(path.glob("*.distcp")), shared)
    with (
        pytest.warns(UserWarning, match="has no index"),
        pytest.raises(CheckpointFailedError, match=r"\.0\.distcp.*: byte"),
    ):
        tte.load(blank(shared_golden_state()), path, no_dist=True)


def test_a_shared_file_of_another_save_is_found(tmp_path: Path) -> None:
    path = shared_steps(tmp_path)[0]
    shared = shared_file(path)
    content = bytearray(shared.read_bytes())
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    at = content.index(index.files[shared.name].save_id, index.files[shared.name].footer_offset)
    content[at] ^= 1
    shared.write_bytes(content)
    (damage,) = verify(path).damages
    assert damage.file == shared.name
    with pytest.raises(CheckpointFailedError, match=re.escape(shared.name)):
        tte.load(blank(shared_golden_state()), path, no_dist=True)


def test_flipped_bytes_of_a_shared_file_are_found_in_each_step(tmp_path: Path) -> None:
    steps = shared_steps(tmp_path)
    with shared_file(steps[2]).open("r+b") as stream:
        stream.seek(9000)
        stream.write(b"\xff\xee" * 8)
    for step in steps:
        (damage,) = verify(step, is_deep=True).damages
        assert damage.kind == "checksum"


def test_without_its_metadata_a_checkpoint_with_a_shared_file_is_no_leftover(tmp_path: Path) -> None:
    """Its files have ids in their names, as those of a save in place that died have."""
    for step in shared_steps(tmp_path):
        (step / ".metadata").unlink()
        assert find_dead_files(step) == []


def test_names_say_who_wrote_a_file_and_whose_it_is() -> None:
    first, second = "1" * 32, "2" * 32
    copy = f"__4_{first}.0.{second}.distcp"
    assert is_checkpoint_name(copy) and sharing_save(copy) == first and save_id_of(copy) == second
    # Links of a checkpoint that was copied into a store are not taken for what another save left.
    assert save_id_of(f"__4_{first}.0.distcp") is None


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_loads_them(version: str) -> None:
    loaded = load(blank(golden_state()), dcp.FileSystemReader(GOLDEN / version), dcp.DefaultLoadPlanner())
    assert differences(loaded, golden_state()) == []


def test_the_current_version_writes_the_same_records(tmp_path: Path) -> None:
    """A change of the bytes is a change of the format: it needs a new version, or a word in docs/format.md."""
    dcp.save(golden_state(), storage_writer=FileWriter(tmp_path), no_dist=True)
    new, old = ((path / "__0_0.distcp").read_bytes() for path in (tmp_path, GOLDEN / VERSIONS[-1]))
    footer = old.index(b"TTEFOOTR")
    begin = old.index(b"archive/data.pkl") - 30  # torch.save of values may differ from torch to torch
    assert new.index(b"TTEFOOTR") == footer
    assert new[begin:footer].count(b"PK\x03\x04") == old[begin:footer].count(b"PK\x03\x04")
    assert new[-24:] == old[-24:]
