"""What ranks print of a refusal that nothing catches."""

import subprocess
import sys
from pathlib import Path

import pytest
import warm_processes

from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.errors.printed_once import leave_report_to_rank_0

PROGRAM = """
import sys, torch, torch.distributed as dist, torchtitan_ext as tte
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
tte.save({"a": torch.zeros(3)}, f"{folder}/step")
tte.load({"b": torch.zeros(3)}, f"{folder}/step")
"""


def test_rank_0_prints_the_report_alone(tmp_path: Path) -> None:
    command = ["-c", PROGRAM]
    ranks = [warm_processes.Popen([*command, rank, tmp_path], stderr=subprocess.PIPE) for rank in range(2)]
    first, second = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "Traceback" in first and "Missing key in checkpoint state_dict: b." in first
    line = "rank 1, <string>:6: load refused, nothing was changed; 1 problem(s), which rank 0 prints"
    assert line in second.splitlines() and "Traceback" not in second


def test_others_print_when_rank_0_had_time_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    printed_by_then: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: printed_by_then.append(capsys.readouterr().err))
    try:
        raise refusal("load", [Problem("missing_key", "b", "is missing")])
    except Exception as error:
        leave_report_to_rank_0(error, 1)
        sys.excepthook(type(error), error, error.__traceback__)
    assert printed_by_then == [""] and capsys.readouterr().err.startswith("rank 1, ")
