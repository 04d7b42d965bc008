"""Asynchronous saves whose process is killed wherever they are: the last step stays, nothing is mixed."""

import random
import subprocess
from pathlib import Path

import pytest
import torch
import warm_processes
from tier import SOAK

import torchtitan_ext as tte

NUM_KILLS = 6 * SOAK

TRAINER = """
import sys, torch
import torchtitan_ext as tte

run, first = sys.argv[1], int(sys.argv[2])
state = {f"w{index}": torch.empty(1 << 16) for index in range(24)}
manager, saved = tte.CheckpointManager(run, keep=2), None
for step in range(first, first + 10_000):
    for tensor in state.values():
        tensor.fill_(step)
    if saved is not None:
        print("saved" if saved.exception() is None else "failed", step - 1, saved.exception(), flush=True)
    manager.save({**state, "step": step}, step)
    saved = manager.pending
    print("started", step, flush=True)
"""


def load_latest(run: Path) -> int:
    state = {**{f"w{index}": torch.empty(1 << 16) for index in range(24)}, "step": -1}
    tte.load(state, run, step="last-good")
    step = state.pop("step")
    assert all(bool((tensor == step).all()) for tensor in state.values()), step
    return int(step)


@pytest.mark.nightly("kills")
def test_a_trainer_killed_at_any_moment(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    chosen = random.Random(7)
    first = 1
    for _ in range(NUM_KILLS):
        with warm_processes.Popen(
            [tmp_path / "trainer.py", tmp_path / "run", first], stdout=subprocess.PIPE
        ) as trainer:
            assert trainer.stdout is not None
            lines = [trainer.stdout.readline() for _ in range(chosen.randint(5, 9))]
            trainer.kill()
            lines += trainer.stdout.read().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        last_saved = max(int(line[1]) for line in words if line[0] == "saved")
        started = next(int(line[1]) for line in reversed(words) if line[0] == "started")
        assert last_saved <= load_latest(tmp_path / "run") <= started + 1
        first = started + 2
