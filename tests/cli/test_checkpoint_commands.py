"""``diff``, ``reshard`` and ``convert`` as commands: exit codes, output, options."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import warm_processes

import torchtitan_ext as tte
from torchtitan_ext.cli.options import amount_of
from torchtitan_ext.cli.output import DIFFERS, FINE, SCHEMA_VERSION, UNREADABLE, WRONG_USAGE


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm_processes.run(["-m", "torchtitan_ext", *arguments], capture_output=True)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    tte.save({"model": {"w": torch.arange(12.0).view(3, 4)}, "step": 7}, path / "a")
    changed = torch.arange(12.0).view(3, 4)
    changed[1, 2] = float("nan")
    torch.save({"model": {"w": changed}, "step": 7}, path / "b.pt")
    return path


def test_the_story_of_a_checkpoint(run_dir: Path) -> None:
    resharded = call(
        "reshard", run_dir / "a", run_dir / "c", "--mesh", "dp=2,tp=2", "--shard", "*.w=tp:1", "--processes", 2
    )
    assert (resharded.returncode, resharded.stdout) == (FINE, f"{run_dir / 'c'}: 2 keys, 48 B for 4 ranks\n")
    exported = call("convert", run_dir / "c", run_dir / "d", "--to", "hf", "--prefix", "model", "--json")
    assert exported.returncode == FINE
    report = json.loads(exported.stdout)
    assert report.keys() == {
        "schema_version",
        "num_keys",
        "num_bytes",
        "num_files",
        "dropped",
        "cast",
        "is_exact",
        "path",
        "seconds",
    }
    same = call("diff", run_dir / "a", run_dir / "d", "--prefix", "model")
    assert (same.returncode, same.stdout) == (FINE, "0 keys differ, 1 is equal\n")
    differs = call("diff", run_dir / "c", run_dir / "b.pt", "--values", "--json")
    assert differs.returncode == DIFFERS
    assert json.loads(differs.stdout) == {
        "schema_version": SCHEMA_VERSION,
        "is_equal": False,
        "num_equal": 1,
        "num_unread": 0,
        "differences": [{
            "key": "model.w", "kind": "values", "a": "float32 [3, 4]", "b": "float32 [3, 4]",
            "values": {
                "num_different": 1, "num_elements": 12, "first_index": [1, 2], "first_a": 6.0, "first_b": "nan",
                "max_abs": 0.0, "max_rel": 0.0,
            },
        }],
    }  # fmt: skip


def test_exit_codes(run_dir: Path, tmp_path: Path) -> None:
    cases = {
        ("convert", run_dir / "nothing", tmp_path / "x", "--to", "hf"): (UNREADABLE, "No such file"),
        ("convert", run_dir / "a", run_dir / "b.pt", "--to", "dcp"): (WRONG_USAGE, "pass --overwrite to replace it"),
        ("reshard", run_dir / "a", tmp_path / "x", "--mesh", "dp"): (WRONG_USAGE, "expected axes and sizes"),
        ("diff", run_dir / "a", tmp_path): (UNREADABLE, "is no checkpoint"),
        ("diff", run_dir / "a", run_dir / "a", "--only", "lm_head*"): (WRONG_USAGE, "which matches no key"),
    }
    for arguments, (code, text) in cases.items():
        result = call(*arguments)
        assert (result.returncode, text in " ".join(result.stderr.split())) == (code, True), result.stderr
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_was_cast_is_said(run_dir: Path, tmp_path: Path) -> None:
    done = call(
        "convert", run_dir / "a", tmp_path / "half", "--to", "safetensors", "--dtype", "bfloat16", "--only", "model.*"
    )
    assert done.stdout.splitlines()[1:] == ["cast to bfloat16: 1 tensor (model.w); values are rounded"]
    wrong = call("convert", run_dir / "a", tmp_path / "x", "--to", "safetensors", "--dtype", "int8")
    assert wrong.returncode == WRONG_USAGE and "'bfloat16'" in wrong.stderr


def test_amounts_of_memory() -> None:
    amounts = [amount_of(text) for text in ("4GB", "512MiB", "1.5 gb", "2000000")]
    assert amounts == [4 * 10**9, 512 << 20, 1_500_000_000, 2_000_000]
