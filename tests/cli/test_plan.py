"""The command `plan`: what it prints, its keys of JSON, its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import torchtitan_ext as tte
from torchtitan_ext.cli.app import app
from torchtitan_ext.cli.output import DIFFERS, FINE, WRONG_USAGE
from torchtitan_ext.errors import UnknownFormatError

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "dry_run.md").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-1"
    state = {"model": {"w": torch.zeros(64, 16), "b": torch.zeros(7)}, "lr": 0.5, "rng": {"rank_0": [1]}}
    tte.save(state, path, no_dist=True)
    return path


def plan(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_table(checkpoint: Path) -> None:
    result = plan(checkpoint, "--mesh", "dp=4", "--policy", "rng=reset")
    assert result.exit_code == FINE
    lines = result.stdout.splitlines()
    assert lines[0] == "4 ranks (dp 4)"
    assert lines[1].split() == ["least", "median", "most", "all", "ranks"]
    assert [line.split("  ")[1] for line in lines[2:5]] == ["state", "save: bytes", "load: bytes"]
    assert "saved by 1 rank, loaded by 4 ranks (dp 4)" in lines


def test_a_load_that_would_be_refused(checkpoint: Path) -> None:
    result = plan(checkpoint, "--mesh", "dp=4")
    assert result.exit_code == DIFFERS
    assert "A load would end with:" in result.stdout
    assert "rng.rank_1" in result.stdout


def test_json(checkpoint: Path) -> None:
    result = plan(checkpoint, "--mesh", "dp=2,tp=2", "--shard", "w=tp:1", "--component", "model", "--json")
    assert result.exit_code == FINE
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.keys() == {"schema_version", "world", "save", "load", "notes"}
    assert found["save"].keys() == {"ranks", "problems"}
    assert found["load"].keys() == {"ranks", "problems", "report"}
    del found["schema_version"]
    for part in (found, found["save"], found["load"], found["save"]["ranks"][0], found["load"]["ranks"][0]):
        assert all(f"`{key}`" in PAGE or f"`load.{key}`" in PAGE for key in part), part.keys()
    assert [one["num_bytes"] for one in found["load"]["ranks"]] == [1024 + 16, 1024 + 16, 1024 + 12, 1024 + 12]


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "dp"),
        ("--mesh", "dp=2,ring=2"),
        ("--mesh", "dp=2", "--shard", "w"),
        ("--mesh", "dp=2", "--shard", "w=tp:0"),
        ("--mesh", "dp=2", "--policy", "rng=rest"),
        ("--mesh", "pp=2,dp=2"),
        ("--mesh", "dp=2", "--component", "modle"),
        ("--mesh", "dp=2", "--component", "model", "--component", "*.wq"),
        ("--mesh", "tp=2", "--shard", "wo=tp:0"),
        ("--mesh", "tp=2", "--shard", "*=tp:2"),
        (),
    ],
)
def test_wrong_usage(checkpoint: Path, options: tuple[str, ...]) -> None:
    assert plan(checkpoint, *options).exit_code == WRONG_USAGE


def test_wrong_usage_names_the_form(checkpoint: Path) -> None:
    policy = plan(checkpoint, "--mesh", "dp=2", "--policy", "model")
    assert policy.exit_code == WRONG_USAGE and "got 'model', expected COMPONENT=ACTION" in policy.stderr


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert isinstance(plan(tmp_path, "--mesh", "dp=2").exception, UnknownFormatError)  # `main` makes an exit code of it
    assert isinstance(plan(tmp_path / "none", "--mesh", "dp=2").exception, FileNotFoundError)


def test_files_of_other_formats(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"w": torch.zeros(64, 16), "b": torch.zeros(7)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    torch.save({**tensors, "lr": 0.5}, tmp_path / "model.pt")

    loads = plan(tmp_path / "hf", "--mesh", "dp=4")
    assert loads.exit_code == FINE
    for path in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        load = json.loads(plan(path, "--mesh", "dp=4", "--json").stdout)["load"]
        assert load["problems"] == []
        assert sum(one["num_bytes"] for one in load["ranks"]) == 64 * 16 * 4 + 7 * 4
    refused = plan(tmp_path / "model.pt", "--mesh", "dp=4", "--json")
    assert refused.exit_code == DIFFERS
    load = json.loads(refused.stdout)["load"]
    assert f"torchtitan-ext convert {tmp_path / 'model.pt'} <directory> --to dcp" in load["problems"][0]["detail"]
    assert sum(one["num_bytes"] for one in load["ranks"]) >= 64 * 16 * 4 + 7 * 4
