"""Checkpoints that the real DeepSpeed wrote, as sources: each tensor is what DeepSpeed says that it is as a whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source

pytest.importorskip("deepspeed")

SUPPORT = Path(__file__).parent.parent / "support"


def train(directory: Path, num_ranks: int, stage: int, dtype: str) -> dict[str, torch.Tensor]:
    """Lets a job save; returns the tensors that it should have saved."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    run([*launcher, SUPPORT / "deepspeed_job.py", stage, dtype, directory])
    expected: dict[str, torch.Tensor] = torch.load(directory / "expected.pt")
    return expected


def run(command: list[object]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


def tensors_of(source: Path, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by flat key, without the steps of the optimizer."""
    convert(open_source(source), directory / "new.pt", to="torch", num_processes=1, overwrite=True)
    saved = torch.load(directory / "new.pt")
    assert (saved["global_steps"], saved["client_state"]["epoch"]) == (2, 4)
    found = {f"{top}.{name}": value for top in ("model", "optimizer") for name, value in saved[top].items()}
    return {key: one for key, one in found.items() if isinstance(one, torch.Tensor) and not key.endswith(".step")}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize(
    ("stage", "num_ranks", "dtype"), [(1, 3, "bf16"), (2, 1, "bf16"), (2, 2, "fp32"), (3, 3, "bf16")]
)
def test_each_stage(tmp_path: Path, stage: int, num_ranks: int, dtype: str) -> None:
    expected = train(tmp_path, num_ranks, stage, dtype)
    found = tensors_of(tmp_path / "saved", tmp_path)
    check_equal(found, expected)
    trained = {
        key[6:]
        for key in expected
        if key.split(".")[1] in ("embedding", "first", "last", "scale") and key.startswith("model.")
    }
    parts = {f"optimizer.state.{name}.{part}" for name in trained for part in ("exp_avg", "exp_avg_sq")}
    assert {key for key in found if key.startswith("optimizer.")} == parts
    assert found["model.embedding.weight"].shape == (7, 5)
    assert open_source(tmp_path / "saved").read_value("optimizer.param_groups.scale.weight_decay") == 0.0

    universal = tmp_path / "universal" / "step"
    arguments = ["--input_folder", tmp_path / "saved" / "global_step2", "--output_folder", universal]
    run(
        ["-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--num_extract_workers", 1, "--num_merge_workers", 1]
    )
    from_universal = tensors_of(universal, tmp_path)
    assert set(from_universal) == set(found)
    check_equal(from_universal, found)
