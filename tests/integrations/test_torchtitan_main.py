"""torchtitan's main has other data loaders than 0.3.0: ``elastic_checkpoint`` works with it, ``elastic_data`` says why
it does not. Against stand-ins of main's shape: main is in no release."""

import subprocess
from pathlib import Path

import pytest
import warm_processes
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchtitan_ext as tte
from torchtitan_ext.storage.commit.branch import remember_step
from torchtitan_ext.storage.native import file_writer

SCRIPT = Path(__file__).parents[1] / "support" / "torchtitan_main.py"


def run_ranks(folder: Path, world_size: int, num_steps: int) -> list[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [warm_processes.Popen([SCRIPT, folder, rank, world_size, num_steps], **pipes) for rank in range(world_size)]
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


def test_a_step_that_was_left_behind_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill between the commit of a run that was set back and the moves of its later steps."""
    for num_steps in (1, 2, 3):
        run_ranks(tmp_path, 1, num_steps)
    run = tmp_path / "run"
    remember_step(run / "step-1")
    monkeypatch.setattr(file_writer, "set_aside", lambda *_, **__: None)
    whole = _load_state_dict_from_keys(checkpoint_id=run / "step-3")
    tte.save(whole, run / "step-2")
    assert sorted(path.name for path in run.glob("step-*")) == [f"step-{step}" for step in (1, 2, 3, 6)]
    (text,) = run_ranks(tmp_path, 1, 4)
    assert text.splitlines()[-1] == "ran: True 7 70 [1, 2, 3, 4, 5, 6, 7]", "from what step-2 holds, not from step-6"
