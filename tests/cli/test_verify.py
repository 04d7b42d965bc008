"""``torchtitan-ext verify``: what is damaged is named, on every format; what cannot be proved is said."""

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import call, call_importing, flip, make, patch_metadata
from checkpoints import of_single_rank
from torch.utils.serialization import config

from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE
from torchtitan_ext.storage.inspect.verify import find_damage, verify

KINDS = ["stock", "ours", "ours without .metadata", "safetensors directory", "safetensors", "torch"]
DATA = {
    "stock": "__0_0.distcp",
    "ours": "__0_0.distcp",
    "ours without .metadata": "__0_0.distcp",
    "safetensors directory": "model-00002-of-00002.safetensors",
    "safetensors": "",
    "torch": "",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(), ("--deep",)])
def test_good_ones_are_whole(tmp_path: Path, kind: str, options: tuple[str, ...]) -> None:
    path = make(tmp_path / "c", kind)
    done = call("verify", path, *options, "--json")
    assert (done.code, done.err) == (FINE, "")
    assert done.json["is_whole"] and done.json["damages"] == [] and done.json["is_deep"] == bool(options)
    assert done.json["num_bytes"] >= 8_000_000
    is_proved = "safetensors" not in kind
    assert (done.json["without_checksums"] == []) == (is_proved or not options)
    assert call("verify", path, *options).out.startswith(f"{path}: whole (")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_damaged(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "c.safetensors", kind)
    file = path / DATA[kind]
    os.truncate(file, file.stat().st_size // 2)
    done = call("verify", path, "--json")
    assert done.code == DIFFERS
    assert [damage["file"] for damage in done.json["damages"]] == [file.name]
    assert str(file) in done.json["damages"][0]["what"]
    assert done.json["damages"][0]["kind"] == {"safe": "header", "torc": "record"}.get(kind[:4], "size")


@pytest.mark.parametrize("kind", KINDS[:4])
def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nobody knows then. A damage that is seen beside it stays one."""
    run, name = tmp_path / "run", DATA[kind]
    make(run / "step-1", "ours")
    path = make(run / "step-2", kind) if "safe" not in kind else make(tmp_path / "hf", kind)
    real_open, real_path_open = os.open, Path.open

    def refuse(file: object, *arguments: Any, **options: Any) -> int:
        if os.path.basename(str(file)) == name:
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return real_open(file, *arguments, **options)  # type: ignore[call-overload, no-any-return]

    def refuse_path(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_path_open(file, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse_path)
    done = call("verify", path)
    assert (done.code, done.out) == (UNREADABLE, "")
    assert done.err == f"torchtitan-ext: {path / name} cannot be read: Permission denied\n"
    shown = call("verify", path, "--json")
    assert shown.code == UNREADABLE and [damage["kind"] for damage in shown.json["damages"]] == ["unreadable"]
    if "safe" not in kind:
        assert find_damage(path) is not None and call("verify", run).code == UNREADABLE
        (run / "step-3").mkdir()
        (run / "step-3" / ".metadata").touch()
        assert call("verify", run).code == DIFFERS


@pytest.mark.parametrize("kind", ["stock", "ours", "ours without .metadata", "torch"])
def test_a_flipped_bit_is_found_by_a_deep_look(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "c", kind)
    flip(path / DATA[kind], 4_000_000)
    assert call("verify", path).code == FINE
    done = call("verify", path, "--deep", "--json")
    assert done.code == DIFFERS
    (damage,) = done.json["damages"]
    assert damage["file"] == (path / DATA[kind]).name
    if kind.startswith("ours"):
        assert "in them lie layers.0.wq[" in damage["what"]
    elif kind == "stock":
        assert "the record of layers.0.wq" in damage["what"] and "Bad CRC-32" in damage["what"]


def test_ours_without_its_index_is_verified_by_footers_and_not_whole(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "ours")
    (path / ".tte_index").unlink()
    for options in ([], ["--deep"]):
        done = call("verify", path, *options, "--json")
        assert done.code == DIFFERS
        assert [(one["file"], one["kind"]) for one in done.json["damages"]] == [(".tte_index", "lost")]
    flip(path / "__0_0.distcp", 4_000_000)
    done = call("verify", path, "--deep", "--json")
    assert [one["kind"] for one in done.json["damages"]] == ["checksum", "lost"]
    assert "in them lie layers.0.wq" in done.json["damages"][0]["what"]


def test_all_damages_are_named(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "ours")
    for position in (3_000_000, 3_500_000, 7_400_000):
        flip(path / "__0_0.distcp", position)
    found = call("verify", path, "--deep", "--json").json["damages"]
    assert len(found) == 2 and all("__0_0.distcp: bytes " in damage["what"] for damage in found)
    shown = call("verify", path, "--deep").out.splitlines()
    assert shown[0].startswith(f"{path}: 2 damages (") and len(shown) == 3


@pytest.mark.parametrize(
    ("damage", "file", "text"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp", "No such file"),
        (lambda path: flip(path / "__0_0.distcp", -60), "__0_0.distcp", "footer|checksum|digest"),
        (lambda path: flip(path / ".tte_index", 40), ".tte_index", ".tte_index"),
        (lambda path: flip(path / ".metadata", 300), ".metadata", ".metadata"),
        (lambda path: os.truncate(path / ".metadata", 50), ".metadata", "pickle: at byte"),
        (lambda path: (path / ".metadata").write_bytes(pickle.dumps(print)), ".metadata", "metadata"),
    ],
)
def test_what_is_wrong_is_found_without_reading_data(
    tmp_path: Path, damage: Callable[[Path], object], file: str, text: str
) -> None:
    path = make(tmp_path / "c", "ours")
    damage(path)
    done = call("verify", path, "--json")
    assert done.code == DIFFERS
    assert [damage["file"] for damage in done.json["damages"]] == [file]
    assert any(word in done.json["damages"][0]["what"] for word in text.split("|"))


def test_a_file_of_another_save_is_damaged(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", "ours"), make(tmp_path / "b", "ours")
    shutil.copy(second / "__0_0.distcp", first)
    done = call("verify", first)
    assert done.code == DIFFERS and "__0_0.distcp" in done.out


def test_stock_records_without_crcs_are_said_not_to_be_proved(tmp_path: Path) -> None:
    config.save.compute_crc32 = False
    try:
        path = make(tmp_path / "c", "stock")
    finally:
        config.save.compute_crc32 = True
    done = call("verify", path, "--deep")
    assert done.code == FINE and "no checksum of all bytes: __0_0.distcp" in done.out


def test_metadata_that_cannot_be_loaded_is_damaged(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "stock")

    def lose_rows(metadata: dcp.Metadata) -> None:
        entry = metadata.state_dict_metadata["layers.0.wq"]
        entry.chunks[0].sizes = torch.Size([1500, 1000])
        place = next(index for index in metadata.storage_data if index.fqn == "note")
        del metadata.storage_data[place]

    patch_metadata(path, lose_rows)
    done = call("verify", path)
    assert done.code == DIFFERS
    assert "does not say in which file note lies" in done.out
    assert "the chunks of layers.0.wq [2000, 1000] leave out [1500, 0]: it cannot be loaded" in done.out


def test_records_are_compared_with_the_metadata(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "stock")

    def claim(metadata: dcp.Metadata) -> None:
        entry = metadata.state_dict_metadata["layers.0.wq"]
        entry.size = entry.chunks[0].sizes = torch.Size([2001, 1000])
        metadata.state_dict_metadata["step"].properties.dtype = torch.float64

    patch_metadata(path, claim)
    assert call("verify", path).code == FINE
    done = call("verify", path, "--deep")
    assert done.code == DIFFERS
    assert "it is float32 [2000, 1000], the metadata says float32 [2001, 1000]" in done.out
    assert "it is int64 [], the metadata says float64 []" in done.out


def test_an_index_of_safetensors_is_compared_with_the_files(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "safetensors directory")
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"step"', '"stop"'))
    assert "for stop, which it does not hold" in call("verify", path).out
    (path / DATA["safetensors directory"]).unlink()
    assert "and it is not there" in call("verify", path).out
    index.write_text("{}")
    assert call("verify", path, "--json").json["damages"][0]["file"] == index.name


def test_ranks_with_metadata_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "own"
    of_single_rank(path, {"w": torch.ones(300_000)})
    assert call("verify", path, "--deep").code == FINE
    (data,) = path.glob("*.distcp")
    flip(data, 500_000)
    assert call("verify", path, "--deep", "--json").json["damages"][0]["file"] == data.name


def test_a_run_is_verified_step_by_step(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        make(tmp_path / f"step-{step}", "ours")
    (tmp_path / "step-30").mkdir()
    assert call("verify", tmp_path, "--deep").code == FINE
    flip(tmp_path / "step-10" / "__0_0.distcp", 1_000_000)
    done = call("verify", tmp_path, "--deep", "--json")
    assert done.code == DIFFERS and not done.json["is_whole"]
    assert [(step["step"], step.get("is_whole")) for step in done.json["steps"]] == [
        (5, True), (10, False), (20, True), (30, None),
    ]  # fmt: skip
    shown = call("verify", tmp_path).out.splitlines()
    assert shown[-1] == f"{tmp_path / 'step-30'}: not finished" and len(shown) == 4


def test_what_is_no_checkpoint_is_unreadable(tmp_path: Path) -> None:
    assert call("verify", tmp_path).code == UNREADABLE
    assert call("verify", tmp_path / "nothing").code == UNREADABLE


@pytest.mark.parametrize("kind", KINDS)
def test_no_torch_is_imported(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "c", kind)
    done, imported = call_importing({"torch", "numpy"}, "verify", "--deep", path)
    assert ": whole (" in done.out and imported == set()


def test_a_damaged_index_is_named_whatever_the_directory_is_called(tmp_path: Path) -> None:
    directory = tmp_path / "run: second/model"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "model.safetensors.index.json").write_text("{")
    (damage,) = verify(directory).damages
    assert damage.file == "model.safetensors.index.json"
    assert "is no index of safetensors files" in damage.what
