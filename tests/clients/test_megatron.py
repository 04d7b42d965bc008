"""A checkpoint that the real Megatron-Core wrote, as a source."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source

pytest.importorskip("megatron.core")

JOB = Path(__file__).parent.parent / "support" / "megatron_job.py"


def test_torch_dist(tmp_path: Path) -> None:
    from megatron_job import whole_tensors

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(JOB), str(tmp_path / "saved")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    source = open_source(tmp_path / "saved")
    convert(source, tmp_path / "new.pt", to="torch", num_processes=1)
    found = torch.load(tmp_path / "new.pt")
    for key, value in whole_tensors().items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key
    assert (found["iteration"], found["args"]["lr"]) == (7, 0.1)
    assert source.read_value("rng_state/shard_1_2") == [{"seed": 1}]
