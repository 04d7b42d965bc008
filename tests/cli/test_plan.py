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
    result = plan(checkpoint, "--mesh", "dp=4", "--policy", "rng=reset", "--bandwidth", "1kB/s")
    assert result.exit_code == FINE
    lines = result.stdout.splitlines()
    assert lines[0] == "4 ranks (dp 4); tensors are held 1 times"
    assert lines[1].split() == ["least", "median", "most", "all", "ranks"]
    assert [line.split("  ")[1] for line in lines[2:10]] == [
        "state",
        "save: records",
        "save: file",
        "save: host memory",
        "load: reads",
        "load: bytes",
        "load: files",
        "load: host memory",
    ]
    assert "saved by 1 rank, loaded by 4 ranks (dp 4)" in lines
    assert [line.split(":")[0] for line in lines[10:14]] == ["save", "save", "load", "load"]
    assert all(line.endswith("seconds") for line in lines[10:14])


def test_a_load_that_would_be_refused(checkpoint: Path) -> None:
    result = plan(checkpoint, "--mesh", "dp=4")
    assert result.exit_code == DIFFERS
    assert "A load would end with:" in result.stdout
    assert "rng.rank_1" in result.stdout
    assert "To go on without these: policy=ElasticPolicy({'rng': 'reset'})" in result.stdout


def test_json(checkpoint: Path) -> None:
    result = plan(checkpoint, "--mesh", "dp=2,tp=2", "--shard", "w=tp:1", "--component", "model", "--json")
    assert result.exit_code == FINE
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.keys() == {"schema_version", "world", "device", "copies", "save", "load", "data_loaders", "notes"}
    assert found["save"].keys() == {
        "ranks", "num_bytes", "num_files", "num_parts", "metadata_bytes", "index_bytes", "seconds", "metadata_seconds",
        "problems",
    }  # fmt: skip
    assert found["load"].keys() == {
        "ranks", "num_bytes", "saved_bytes", "amplification", "metadata_bytes", "seconds", "metadata_seconds",
        "problems", "report", "file_bytes",
    }  # fmt: skip
    del found["schema_version"]
    for part in (found, found["save"], found["load"], found["save"]["ranks"][0], found["load"]["ranks"][0]):
        assert all(f"`{key}`" in PAGE or f"`load.{key}`" in PAGE for key in part), part.keys()
    assert [one["num_reads"] for one in found["load"]["ranks"]] == [2, 2, 2, 2]
    assert found["load"]["saved_bytes"] == 64 * 16 * 4 + 7 * 4


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "dp"),
        ("--mesh", "dp=2,ring=2"),
        ("--mesh", "dp=2", "--shard", "w"),
        ("--mesh", "dp=2", "--shard", "w=tp:0"),
        ("--mesh", "dp=2", "--policy", "rng=rest"),
        ("--mesh", "dp=2", "--bandwidth", "fast"),
        ("--mesh", "dp=2", "--device", "tpu"),
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
    for text in ("2", "2.5/s"):
        rate = plan(checkpoint, "--mesh", "dp=2", "--bandwidth", text)
        assert rate.exit_code == WRONG_USAGE and f"got '{text}', expected a number with its unit" in rate.stderr
    assert (
        plan(checkpoint, "--mesh", "dp=2", "--bandwidth", "2MiB/s", "--shared-bandwidth", "3G").exit_code != WRONG_USAGE
    )


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert isinstance(plan(tmp_path, "--mesh", "dp=2").exception, UnknownFormatError)  # `main` makes an exit code of it
    assert isinstance(plan(tmp_path / "none", "--mesh", "dp=2").exception, FileNotFoundError)


def test_files_of_other_formats(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"w": torch.zeros(64, 16), "b": torch.zeros(7)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    torch.save({**tensors, "lr": 0.5}, tmp_path / "model.pt")

    loads = plan(tmp_path / "hf", "--mesh", "dp=4", "--device", "cpu")
    assert loads.exit_code == FINE
    for path in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        load = json.loads(plan(path, "--mesh", "dp=4", "--json").stdout)["load"]
        assert load["problems"] == [] and load["saved_bytes"] == 64 * 16 * 4 + 7 * 4
    refused = plan(tmp_path / "model.pt", "--mesh", "dp=4", "--json")
    assert refused.exit_code == DIFFERS
    load = json.loads(refused.stdout)["load"]
    assert f"torchtitan-ext convert {tmp_path / 'model.pt'} <directory> --to dcp" in load["problems"][0]["detail"]
    assert load["saved_bytes"] >= 64 * 16 * 4 + 7 * 4


def test_stages_of_a_pipeline(checkpoint: Path) -> None:
    stages = ("--shard", "w=pp:0", "--shard", "b=pp:1", "--component", "model", "--json")
    found = json.loads(plan(checkpoint, "--mesh", "pp=2,dp=2", *stages).stdout)
    assert found["world"] == {"size": 4, "mesh": {"pp": 2, "dp": 2}}
    assert [one["state_bytes"] for one in found["load"]["ranks"]] == [2048, 2048, 16, 12]


def test_the_help_fits_a_screen() -> None:
    result = plan("--help")
    assert "Example: torchtitan-ext plan" in result.stdout
    assert len(result.stdout.splitlines()) <= 30
