"""Checkpoints written in another format, or for another mesh, through a transform."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_as
from models import differences
from safetensors.torch import load_file
from transformed_states import TRANSFORM, saved_state, wanted_state
from typer.testing import CliRunner

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.cli.app import app
from torchtitan_ext.errors import TransformError, WrongValueError
from torchtitan_ext.offline.mapped_files import MappedFiles
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.transforms import Rule, Transform

ONE_WAY = ("model.layers.*.norm", "model.layers.*.dense")
BOTH_WAYS = Transform(
    [rule for rule in TRANSFORM.rules if rule.targets[0] not in (*ONE_WAY, "step")]
    + [Rule(f"layers.*.{name}", f"model.layers.*.{name}") for name in ("norm", "fp8", "fp8_scale")]
)


def mapped(path: Path, transform: Transform) -> MappedFiles:
    source = open_source(path)
    assert not isinstance(source, MappedFiles)
    return MappedFiles(source, transform)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.full_like(value, -1) for name, value in wanted_state().items()}
    tte.load({"model": state}, path)
    return state


@pytest.mark.parametrize("kind", ["ours", "stock", "torch", "safetensors", "dp=4,tp=2"])
@pytest.mark.parametrize("max_bytes", [1 << 20, 8 << 20])
def test_weights_are_converted_on_the_way(tmp_path: Path, kind: str, max_bytes: int) -> None:
    state: dict[str, Any] = {**saved_state(), "step": 7} if "safetensors" not in kind else saved_state()
    source = mapped(save_as(kind, tmp_path / "a", state), TRANSFORM)
    convert(source, tmp_path / "b", to="dcp", num_processes=1, max_bytes=max_bytes)
    assert differences(loaded(tmp_path / "b"), wanted_state()) == []
    report = convert(source, tmp_path / "c", to="safetensors", num_processes=1, max_bytes=max_bytes)
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert differences(found, {f"model.{name}": value for name, value in wanted_state().items()}) == []
    assert report.dropped == (("step",) if "step" in state else ())


def test_the_way_back_gives_what_was_there(tmp_path: Path) -> None:
    state = {name: value for name, value in saved_state().items() if not name.startswith("optimizer")}
    save_as("safetensors", tmp_path / "a", state)
    convert(mapped(tmp_path / "a", BOTH_WAYS), tmp_path / "b", to="dcp", num_processes=2)
    back = mapped(tmp_path / "b", Transform.from_json(BOTH_WAYS.inverse().to_json()))
    convert(back, tmp_path / "c", to="safetensors", num_processes=2)
    assert differences(load_file(tmp_path / "c" / "model.safetensors"), state) == []


def test_a_checkpoint_is_written_for_a_mesh(tmp_path: Path) -> None:
    save_as("stock", tmp_path / "a", {**saved_state(), "step": 7})
    report = reshard(
        mapped(tmp_path / "a", TRANSFORM),
        tmp_path / "b",
        mesh={"dp_shard": 3, "tp": 2},
        rules={"*.wq": {"tp": 1}},
        num_processes=1,
    )
    assert report.num_ranks == 6
    assert differences(loaded(tmp_path / "b"), wanted_state()) == []
    step = {"step": 0}
    tte.load(step, tmp_path / "b")
    assert step == {"step": 7}


def test_dtype_is_that_of_the_option(tmp_path: Path) -> None:
    save_as("ours", tmp_path / "a", saved_state())
    source = mapped(tmp_path / "a", TRANSFORM)
    report = convert(source, tmp_path / "b", to="safetensors", dtype="float64", num_processes=1)
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert differences(found, {f"model.{name}": value.double() for name, value in wanted_state().items()}) == []
    assert report.is_exact


def test_a_number_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_as("ours", tmp_path / "a", {"a": torch.tensor([1.0, 1e5])})
    source = mapped(tmp_path / "a", Transform([Rule("a", "b", [])]))
    with pytest.raises(WrongValueError, match="b has the number 100000.0, which float16 cannot hold"):
        convert(source, tmp_path / "b", to="dcp", dtype="float16", num_processes=1)
    assert convert(source, tmp_path / "b", to="dcp", dtype="bfloat16", num_processes=1).num_keys == 1


def test_commands_take_a_file_of_rules(tmp_path: Path) -> None:
    save_as("ours", tmp_path / "a", {**saved_state(), "step": 7})
    (tmp_path / "rules.json").write_text(TRANSFORM.to_json())
    run = CliRunner().invoke
    options = ["--transform", str(tmp_path / "rules.json"), "--processes", "1"]
    done = run(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "dcp", *options])
    assert done.exit_code == 0, done.output
    assert differences(loaded(tmp_path / "b"), wanted_state()) == []
    done = run(app, ["reshard", str(tmp_path / "a"), str(tmp_path / "c"), "--mesh", "dp_shard=2", *options])
    assert done.exit_code == 0, done.output
    assert differences(loaded(tmp_path / "c"), wanted_state()) == []
    for target in ("b", "c"):
        done = run(app, ["diff", str(tmp_path / "a"), str(tmp_path / target), *options[:2]])
        assert (done.exit_code, done.output) == (0, "0 keys differ, 16 are equal\n")
    (tmp_path / "rules.json").write_text(json.dumps({"rules": [{"from": "a", "to": "b", "steps": [{"op": "turn"}]}]}))
    done = run(app, ["convert", str(tmp_path / "a"), str(tmp_path / "d"), "--to", "dcp", *options])
    assert done.exit_code == 2 and "--transform" in done.output and not (tmp_path / "d").exists()
    done = run(app, ["convert", str(tmp_path / "a"), str(tmp_path / "d"), "--to", "dcp", "--transform", "nowhere.json"])
    assert done.exit_code == 2 and "nowhere.json" in done.output


def test_a_transform_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    save_as("ours", tmp_path / "a", saved_state())
    forgetful = Transform(TRANSFORM.rules)
    with pytest.raises(TransformError, match=r"optimizer\.exp_avg: no rule takes it"):
        mapped(tmp_path / "a", forgetful)
    wrong = Transform([Rule("embed", "e", [transforms.reshape([7, -1])])], drop=["**"])
    with pytest.raises(TransformError, match=r"e: step 1, reshape, of the rule from embed: shape: got \[7, -1\]"):
        mapped(tmp_path / "a", wrong)
