"""Every command on huge checkpoints: 100,000 tensors, and the metadata of 1,024 ranks of Llama 405B.

The night reads and writes a tenth of them, and has a thirtieth of the ranks; `make soak` has all. What is quadratic
shows in the time that these take, which is not asserted.
"""

import importlib
import os
from pathlib import Path

import pytest
import torch
from calls import call
from checkpoints import tables_of, with_tables
from tier import SOAK
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.formats.safetensors_files import lay_out

pytestmark = pytest.mark.nightly("memory")

ROOT = Path(__file__).parents[2]
NUM_KEYS = 100_000
NUM_COPIED = NUM_KEYS if SOAK > 1 else NUM_KEYS // 10
NUM_RANKS = 1024 if SOAK > 1 else 32


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of 100,000 tensors, of which there is the index only."""
    sizes = torch.Size([4, 8])
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), sizes)]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), sizes, chunks)
    metadata = Metadata({f"layers.{number}.weight": entry for number in range(NUM_KEYS)}, planner_data={})
    metadata.storage_meta, metadata.version = StorageMeta(save_id="0" * 32), "1.0.0"
    path: Path = tmp_path_factory.mktemp("described") / "step-1"
    path.mkdir()
    (path / ".tte_index").write_bytes(with_tables(_core.encode_index(bytes(16), -1, 0, [], []), tables_of(metadata)))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved") / "step-1"
    state = {f"layers.{number}.weight": torch.full((2, 2), float(number)) for number in range(NUM_COPIED)}
    tte.save(state, storage_writer=FileWriter(path, sync=False), no_dist=True)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metadata and index of Llama 405B with AdamW, without data files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        write_checkpoint = importlib.import_module("bench_dry_run").write_checkpoint
    path: Path = tmp_path_factory.mktemp("llama") / "step-1"
    write_checkpoint(path, NUM_RANKS)
    return path


def test_metadata_of_a_hundred_thousand_tensors(described: Path) -> None:
    shown = call("inspect", described)
    assert shown.code == FINE and len(shown.out.splitlines()) > NUM_KEYS
    assert call("inspect", described, "--json").json["num_tensors"] == NUM_KEYS
    assert len(call("inspect", described, "*9.weight", "--json").json["keys"]) == NUM_KEYS // 10
    run = described.parent
    assert call("ls", run, "--json").json["steps"][0]["state"] == "finished"
    assert call("latest", run).out == f"{described}\n"
    assert call("gc", run, "--keep", 1, "--json").json["removed"] == []


def test_a_safetensors_file_of_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    new = lay_out({f"layers.{number}.weight": ("float32", (2, 2)) for number in range(NUM_KEYS)})
    path.write_bytes(new.header)
    os.truncate(path, new.num_bytes)
    assert call("inspect", path, "--json").json["tensor_bytes"] == NUM_KEYS * 16
    assert len(call("inspect", path, "--shards").out.splitlines()) > NUM_KEYS
    assert call("verify", path, "--deep").out.startswith(f"{path}: whole")


def test_many_tensors_are_verified_planned_and_compared(saved: Path) -> None:
    assert call("verify", saved, "--deep").code == FINE
    assert call("plan", saved, "--mesh", "dp=4").code == FINE
    assert call("diff", saved, saved).out == f"0 keys differ, {NUM_COPIED:,} are equal\n"
    assert call("gc", saved.parent, "--keep", 1).code == FINE


@pytest.mark.parametrize(
    "command",
    [
        ("reshard", "--mesh", "dp=4"),
        ("convert", "--to", "dcp"),
        ("convert", "--to", "safetensors"),
    ],
)
def test_many_tensors_are_copied(saved: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    done = call(name, saved, tmp_path / "new", *options, "--json")
    assert done.code == FINE and done.json["num_keys"] == NUM_COPIED and done.json["num_bytes"] == 16 * NUM_COPIED
    whole = call("verify", tmp_path / "new", "--deep", "--json").json
    assert whole["is_whole"]
    if "dcp" not in command:
        assert call("diff", saved, tmp_path / "new").code == FINE


def test_llama_is_described_and_planned(llama: Path) -> None:
    shown = call("inspect", llama, "--json").json
    assert (shown["world_size"], shown["num_tensors"]) == (NUM_RANKS, 4 * 1137)
    assert shown["tensor_bytes"] > 4e12 and len(shown["files"]) == NUM_RANKS
    assert call("ls", llama.parent, "--json").json["steps"][0]["world_size"] == NUM_RANKS
    assert call("latest", llama.parent).code == FINE
    assert call("gc", llama.parent, "--keep", 1).code == FINE
    assert call("plan", llama, "--mesh", "dp=16,tp=8").code == FINE


def test_llama_without_data_is_damaged(llama: Path) -> None:
    done = call("verify", llama, "--json")
    assert done.code == DIFFERS and len(done.json["damages"]) == NUM_RANKS
    assert all("No such file" in damage["what"] for damage in done.json["damages"])


@pytest.mark.parametrize(
    "command",
    [
        ("diff",),
        ("reshard", "--mesh", "dp=64"),
        ("convert", "--to", "dcp"),
        ("convert", "--to", "safetensors"),
    ],
)
def test_llama_without_data_is_not_copied(llama: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    done = call(name, llama, llama if name == "diff" else tmp_path / "new", *options)
    lost = f"{NUM_RANKS:,} of its {NUM_RANKS:,} data files are not there"
    assert done.code == UNREADABLE and lost in done.err and len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
