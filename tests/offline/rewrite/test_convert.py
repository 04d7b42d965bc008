"""Checkpoints written in other formats."""

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import Hostile, flip_byte, random_bits, save_as, tensors, training_state
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtitan_ext.errors import (
    CheckpointReadError,
    DamagedCheckpointError,
    ReshardError,
    UnsafePickleError,
    WrongValueError,
)
from torchtitan_ext.offline.compare.diff import DiffReport, Tolerance, diff
from torchtitan_ext.offline.rewrite.convert import ConvertReport, convert
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.raw_tensor import dtype_name


def converted(source: Path, target: Path, **options: Any) -> ConvertReport:
    return convert(open_source(source), target, **{"num_processes": 1, "max_bytes": 8 << 20, **options})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["ours", "stock", "torch", "safetensors", "safetensors file", "dp=4,tp=2"])
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_tensors_cross_from_every_format_to_every_other(tmp_path: Path, kind: str, to: Any) -> None:
    state = tensors()
    source = save_as(kind, tmp_path / "a", state)
    report = converted(source, tmp_path / "b", to=to)
    assert (report.num_keys, report.num_files, report.dropped) == (len(state), 1, ())
    assert diff(open_source(source), open_source(tmp_path / "b")) == DiffReport((), len(state))


@pytest.mark.parametrize("kind", ["ours", "stock", "torch", "dp=4,tp=2"])
def test_a_training_state_crosses_with_its_values_and_nesting(tmp_path: Path, kind: str) -> None:
    state = training_state()
    converted(save_as(kind, tmp_path / "a", state), tmp_path / "c", to="dcp")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded.keys() == state.keys() and loaded["step"] == 7
    assert loaded["optimizer"]["groups"] == state["optimizer"]["groups"]
    for key, tensor in state["model"].items():
        assert loaded["model"][key].dtype == tensor.dtype and loaded["model"][key].shape == tensor.shape
        assert torch.equal(bits(loaded["model"][key]), bits(tensor)), key
    assert diff(open_source(tmp_path / "a"), open_source(tmp_path / "c")).differences == ()
    again = {"model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()}, "step": 0}
    dcp.load(again, checkpoint_id=tmp_path / "c", no_dist=True)
    assert again["step"] == 7
    assert torch.equal(bits(again["model"]["wide"]), bits(state["model"]["wide"]))


def test_safetensors_read_what_was_written(tmp_path: Path) -> None:
    state = training_state()
    source = save_as("dp=3,tp=2", tmp_path / "a", state)
    report = converted(
        source, tmp_path / "b", to="safetensors", selection=Selection(prefix="model"), max_file_bytes=17_000
    )
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == [*(f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "b" / names[-1]).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state["model"].values())
    loaded = {}
    for name in names[:-1]:
        part = load_file(tmp_path / "b" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        loaded |= part
    assert report == ConvertReport(len(state["model"]), index["metadata"]["total_size"], 3, ())
    assert loaded.keys() == state["model"].keys()
    assert all(torch.equal(bits(loaded[key]), bits(tensor)) for key, tensor in state["model"].items())


def test_values_that_have_no_room_in_safetensors_are_named(tmp_path: Path) -> None:
    report = converted(save_as("ours", tmp_path / "a", training_state()), tmp_path / "b", to="safetensors")
    assert report.dropped == ("optimizer.groups.0.lr", "optimizer.groups.0.params", "step") or set(report.dropped) == {
        "optimizer.groups",
        "step",
    }
    assert (tmp_path / "b" / "model.safetensors").is_file()


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", {"w": torch.ones(3, dtype=torch.complex128), "v": torch.ones(2)})
    with pytest.raises(ReshardError, match="w: is complex128"):
        converted(source, tmp_path / "b", to="safetensors")
    assert os.listdir(tmp_path) == ["a"]
    assert converted(source, tmp_path / "b", to="safetensors", selection=Selection(("v",))).num_keys == 1
    with pytest.raises(ValueError, match="only: got 'x', which matches no key of .*; there are w, v"):
        converted(source, tmp_path / "c", to="safetensors", selection=Selection(("x",)))


def test_processes_write_what_one_would(tmp_path: Path) -> None:
    state = {f"w{number}": random_bits((300, 700), torch.float32, number) for number in range(4)}
    source = save_as("dp=3", tmp_path / "a", state)
    done: list[int] = []
    options: dict[str, Any] = {"num_processes": 3, "max_bytes": 32 << 20, "progress": done.append}
    report = converted(source, tmp_path / "b", to="safetensors", max_file_bytes=1 << 20, **options)
    assert sum(done) == report.num_bytes == 4 * 300 * 700 * 4
    assert diff(open_source(source), open_source(tmp_path / "b")).differences == ()


def test_stored_strides_of_torch_files_do_not_matter(tmp_path: Path) -> None:
    matrix = random_bits((40, 30), torch.float32)
    state = {
        "transposed": matrix.t(),
        "columns": matrix[:, 3:11],
        "expanded": torch.arange(4.0).expand(3, 4),
        "interleaved": torch.arange(24.0).as_strided((3, 4), (2, 3)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b", to="safetensors")
    loaded = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(bits(loaded[key]), bits(tensor.detach())) for key, tensor in state.items())


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", {"w": random_bits((2048, 300), torch.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="tte_new-"):
            converted(source, tmp_path / "b", to="safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_damage_leaves_what_was_there(tmp_path: Path, to: Any) -> None:
    source = save_as("ours", tmp_path / "a", {"w": random_bits((512, 300), torch.float32)})
    old = {"w": torch.ones(3)}
    target = tmp_path / "b"
    converted(save_as("ours", tmp_path / "old", old), target, to=to)
    flip_byte(source / "__0_0.distcp", 200_000)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        converted(source, target, to=to, overwrite=True)
    assert diff(open_source(tmp_path / "old"), open_source(target)).differences == ()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "old"]


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_targets_that_exist(tmp_path: Path, to: Any) -> None:
    source = save_as("ours", tmp_path / "a", tensors())
    converted(save_as("ours", tmp_path / "old", {"w": torch.ones(3)}), tmp_path / "b", to=to)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        converted(source, tmp_path / "b", to=to)
    converted(source, tmp_path / "b", to=to, overwrite=True)
    assert diff(open_source(source), open_source(tmp_path / "b")).differences == ()


def test_files_of_others_stay(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", tensors())
    target = tmp_path / "b"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        converted(source, target, to="safetensors")
    for max_file_bytes in (1 << 30, 17_000, 16_000, 1 << 30):
        converted(source, target, to="safetensors", overwrite=True, max_file_bytes=max_file_bytes)
        assert diff(open_source(source), open_source(target)) == DiffReport((), len(tensors()))
        assert (target / "tokenizer.json").read_text() == "{}"
    assert sorted(os.listdir(target)) == ["model.safetensors", "tokenizer.json"]


def test_formats_are_known_by_name(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", tensors())
    with pytest.raises(WrongValueError, match="got to='hf', expected one of dcp, safetensors"):
        converted(source, tmp_path / "b", to="hf")
    assert not (tmp_path / "b").exists()


def test_safetensors_are_not_put_beside_what_they_would_not_count_beside(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", tensors())
    other = save_as("ours", tmp_path / "b", {"w": torch.ones(1)})
    with pytest.raises(FileExistsError, match=r"of a checkpoint of DCP"):
        converted(source, other, to="safetensors", overwrite=True)
    chunks = tmp_path / "c"
    chunks.mkdir()
    for name in ("x", "y"):
        save_file({"w": torch.ones(1)}, chunks / f"{name}.safetensors")
    (chunks / "config.json").touch()
    with pytest.raises(FileExistsError, match="several files have chunks"):
        converted(source, chunks, to="safetensors", overwrite=True)
    (chunks / "config.json").unlink()
    converted(source, chunks, to="safetensors", overwrite=True)
    assert os.listdir(chunks) == ["model.safetensors"]


def test_values_that_run_code_are_run_only_where_that_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    made = tmp_path / "made"
    monkeypatch.setenv("HOSTILE_DIR", str(made))
    torch.save({"w": torch.ones(3), "evil": Hostile()}, tmp_path / "a.pt")
    made.rmdir() if made.exists() else None
    with pytest.raises(UnsafePickleError, match="mkdir"):
        open_source(tmp_path / "a.pt")
    dcp.save({"w": torch.ones(3), "evil": Hostile()}, checkpoint_id=tmp_path / "b", no_dist=True)
    source = open_source(tmp_path / "b")
    with pytest.raises(CheckpointReadError, match="evil"):
        source.read_value("evil")
    convert(source, tmp_path / "d", to="dcp", num_processes=1)
    assert convert(source, tmp_path / "e", to="safetensors", num_processes=1).dropped == ("evil",)
    (found,) = diff(source, open_source(save_as("ours", tmp_path / "f", {"w": torch.ones(3), "evil": 1}))).differences
    assert (found.key, found.kind) == ("evil", "unreadable")
    assert diff(source, open_source(tmp_path / "d")).differences == ()
    assert not made.exists()
    open_source(tmp_path / "b", weights_only=False).read_value("evil")
    assert made.exists()


def test_a_checkpoint_without_keys(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", {})
    for to in ("dcp", "safetensors"):
        assert converted(source, tmp_path / to, to=to).num_keys == 0  # type: ignore[arg-type]
        assert open_source(tmp_path / to).state.entries == {}


def saved_floats() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, in several chunks, and numbers that are none."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
    floats = {f"{kind}".removeprefix("torch."): torch.randn(37, 5).to(kind) for kind in kinds}
    odd = {
        "scalar": torch.tensor(0.1),
        "empty": torch.zeros(0, 3),
        "odd": torch.tensor([math.inf, -math.inf, math.nan]),
    }
    others = {"count": torch.tensor(3), "mask": torch.tensor([True, False]), "z": torch.ones(2, dtype=torch.complex64)}
    return {**floats, **odd, **others}


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_floats_are_cast_on_the_way(tmp_path: Path, to: Any, dtype: torch.dtype) -> None:
    state = saved_floats()
    if dtype == torch.float8_e4m3fn:
        del state["float64"], state["odd"]
    report = converted(save_as("dp=3", tmp_path / "a", state), tmp_path / "b", to=to, dtype=dtype_name(dtype))
    wanted = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    assert set(report.cast) == {key for key, value in state.items() if value.dtype != wanted[key].dtype}
    assert report.is_exact == (dtype == torch.float64)
    assert report.num_bytes == sum(value.nbytes for value in wanted.values())
    torch.save(wanted, tmp_path / "wanted.pt")
    # By numbers: which NaN a cast gives is open.
    found = diff(open_source(tmp_path / "b"), open_source(tmp_path / "wanted.pt"), tolerance=Tolerance(atol=1e-300))
    assert found.differences == ()


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_number_that_the_dtype_cannot_hold_is_refused(tmp_path: Path, to: Any) -> None:
    source = save_as("ours", tmp_path / "a", {"v": torch.ones(3), "w": torch.tensor([1.0, 1e5, math.inf])})
    with pytest.raises(WrongValueError, match="dtype: w has the number 100000.0, which float16 cannot hold"):
        converted(source, tmp_path / "b", to=to, dtype="float16")
    assert os.listdir(tmp_path) == ["a"]
    assert converted(source, tmp_path / "b", to=to, dtype="float16", selection=Selection(("v",))).num_keys == 1
