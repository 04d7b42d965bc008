"""torchtitan's main has other data loaders than 0.3.0: ``elastic_checkpoint`` works with it, ``elastic_data`` says why
it does not. Against stand-ins of main's shape: main is in no release."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "torchtitan_main.py"


def run_ranks(folder: Path, world_size: int, num_steps: int) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(num_steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, told
    assert all("elastic_data has replaced nothing" in errors for _, errors in told)
    return [output for output, _ in told]


def test_a_run_goes_on_with_as_many_ranks_and_no_other_number(tmp_path: Path) -> None:
    assert [text.splitlines()[-1] for text in run_ranks(tmp_path, 2, 2)] == [
        "ran: False 2 20 [1, 2]",
        "ran: False 2 20 [101, 102]",
    ]
    again = run_ranks(tmp_path, 2, 1)
    assert [text.splitlines()[-1] for text in again] == ["ran: True 3 30 [1, 2, 3]", "ran: True 3 30 [101, 102, 103]"]
    told = "elastic_data: torchtitan_ext.integrations.torchtitan has no elastic_data with this torchtitan"
    assert all(text.startswith(told) for text in again)
    for text in run_ranks(tmp_path, 1, 1):
        assert "refused:" in text and "dataloader" in text and "ran:" not in text
        assert "elastic_data=" not in text  # no flag that this torchtitan does not have
