"""Which format lies at a path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import without_metadata
from safetensors.torch import save_file
from states import save

import torchtitan_ext as tte
from torchtitan_ext.errors import ReshardError, UnknownFormatError
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.formats.detect import format_of, how_to_load

STATE = {"w": torch.arange(6.0), "step": 3}


def make(path: Path, kind: str) -> Path:
    if kind == "stock":
        save(STATE, dcp.FileSystemWriter(path))
    elif kind == "ours":
        save(STATE, FileWriter(path, sync=False))
    elif kind == "ours without .metadata":
        save(STATE, FileWriter(path, sync=False))
        without_metadata(path)
    elif kind == "of one rank":
        path.mkdir()
        (path / "__3.metadata").touch()
    elif kind == "safetensors directory":
        path.mkdir()
        save_file({"w": STATE["w"]}, path / "model-00001-of-00002.safetensors")
    elif kind == "safetensors":
        save_file({"w": STATE["w"]}, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "torch.save")
    return path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("stock", "dcp"),
        ("ours", "dcp"),
        ("ours without .metadata", "dcp"),
        ("of one rank", "dcp"),
        ("safetensors directory", "safetensors"),
        ("safetensors", "safetensors"),
        ("torch.save", "torch"),
        ("torch.save of torch 1.5", "torch"),
    ],
)
def test_every_format_is_known(tmp_path: Path, kind: str, expected: str) -> None:
    assert format_of(make(tmp_path / "checkpoint", kind)) == expected


def test_a_cut_archive_is_still_torchs(tmp_path: Path) -> None:
    path = make(tmp_path / "model.pt", "torch.save")
    os.truncate(path, path.stat().st_size // 2)
    assert format_of(path) == "torch"


def test_what_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownFormatError, match=r"is no checkpoint: the directory has no .metadata.*; expected a direc"
    ):
        format_of(tmp_path)
    (tmp_path / "step-5").mkdir()
    with pytest.raises(UnknownFormatError, match="the directory of a run, name one of its steps"):
        format_of(tmp_path)
    (tmp_path / "step-5" / "__0_0.distcp").touch()
    with pytest.raises(UnknownFormatError, match="a save that has not finished"):
        format_of(tmp_path / "step-5")
    (tmp_path / "notes").write_text("hello world")
    with pytest.raises(UnknownFormatError, match="begins as none of"):
        format_of(tmp_path / "notes")
    with pytest.raises(FileNotFoundError):
        format_of(tmp_path / "nothing")


WRONG_PATHS = {
    "run": "is the directory of a run, not a checkpoint; pass step='latest', or step=10: it has steps 5, 10",
    "run/step-11": "is not there; near it are step-10",
    "nowhere/step-1": "is not there, nor is PATH/nowhere; give the path of a checkpoint",
    "safe": "holds safetensors files; leave storage_reader out, tte.load reads them; or write it as DCP first: "
    "torchtitan-ext convert PATH/safe <directory> --to dcp",
    "model.pt": "is a file of torch.save, which no load of a job reads; write it as DCP first: torchtitan-ext convert",
    "folder": "is no checkpoint: it holds checkpoints, name one: model_0, optimizer_0",
    "half": "is no checkpoint: it has data files of a save that has not finished",
    ".": "is no checkpoint: it holds a checkpoint, name one: safe",
}


def test_a_load_says_what_lies_at_a_path_and_what_to_call(tmp_path: Path) -> None:
    for name in ("run/step-5", "run/step-10", "folder/model_0", "folder/optimizer_0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make(tmp_path / name, "ours")
    make(tmp_path / "safe", "safetensors directory")
    make(tmp_path / "model.pt", "torch.save")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").touch()
    for name, words in WRONG_PATHS.items():
        for reader in (None, dcp.FileSystemReader(tmp_path / name))[1 if name == "safe" else 0 :]:
            with pytest.raises(ReshardError) as refused:
                tte.load({"w": torch.zeros(6)}, tmp_path / name, storage_reader=reader, no_dist=True)
            text = str(refused.value)
            assert words.replace("PATH", str(tmp_path)) in text, name
            assert "Paths without a checkpoint that a load reads (1):" in text
    assert how_to_load(tmp_path / "run" / "step-5") is None and how_to_load(tmp_path / "folder" / "model_0") is None


def test_no_torch_is_imported() -> None:
    modules = "formats.detect checkpoint_files commit.commit commit.leftovers commit.opened commit.save_lock"
    code = "import sys, importlib\n" + "".join(
        f"importlib.import_module('torchtitan_ext.storage.{name}')\n" for name in modules.split()
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "print({'torch', 'numpy'} & set(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"
