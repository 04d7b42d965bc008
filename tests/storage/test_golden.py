"""Checkpoints of every format version that has been released: they load, to the bit, and stock loads them too."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from golden.generate import golden_state, shared_golden_state, small_golden_state
from states import blank, differences, load

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.checkpoint_files import sharing_save

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
def test_the_one_that_shares_a_file_loads(verify: Any) -> None:
    path = GOLDEN / "version_1_shared"
    shared = [name for name in map(sharing_save, os.listdir(path)) if name is not None]
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    assert [file.save_id and file.save_id.hex() for file in index.files.values()] == [None, *shared] != [None]
    loaded = load(blank(shared_golden_state()), FileReader(path, verify), tte.LoadPlanner())
    assert differences(loaded, shared_golden_state()) == []
    loaded = load(blank(shared_golden_state()), dcp.FileSystemReader(path), dcp.DefaultLoadPlanner())
    assert differences(loaded, shared_golden_state()) == []


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
