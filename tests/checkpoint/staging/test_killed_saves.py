"""Asynchronous saves whose process, or its child, is killed at any moment: the last step stays, nothing is mixed."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import warm_processes
from extent import SOAK
from test_child_process import is_running

import torchtitan_ext as tte

NUM_KILLS = 2 * SOAK

TRAINER = """
import sys, torch
import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager

if __name__ == "__main__":
    run, uses_child, first = sys.argv[1], sys.argv[2] == "child", int(sys.argv[3])
    state = {f"w{index}": torch.empty(1 << 16) for index in range(24)}
    stager = CpuStager(process=uses_child, host_memory_bytes=None if uses_child else int(sys.argv[4]))
    manager, saved = tte.CheckpointManager(run, keep=2, stager=stager), None
    for step in range(first, first + 10_000):
        for tensor in state.values():
            tensor.fill_(step)
        if saved is not None:
            print("saved" if saved.exception() is None else "failed", step - 1, saved.exception(), flush=True)
        manager.save({**state, "step": step}, step)
        saved = manager.pending
        print("started", step, stager.child()._process.pid if uses_child else 0, flush=True)
"""


def load_latest(run: Path) -> int:
    state = {**{f"w{index}": torch.empty(1 << 16) for index in range(24)}, "step": -1}
    tte.load(state, run, step="last-good")
    step = state.pop("step")
    assert all(bool((tensor == step).all()) for tensor in state.values()), step
    return int(step)


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize(("kind", "limit"), [("thread", 1 << 30), ("thread", 3 << 20), ("child", 0)])
def test_a_trainer_killed_at_any_moment(tmp_path: Path, kind: str, limit: int) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    chosen = random.Random(7)
    first = 1
    for _ in range(NUM_KILLS):
        command = [tmp_path / "trainer.py", tmp_path / "run", kind, first, limit]
        with warm_processes.Popen(command, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            lines = [trainer.stdout.readline() for _ in range(chosen.randint(5, 9))]
            time.sleep(chosen.uniform(0, 0.05))
            trainer.kill()
            lines += trainer.stdout.read().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        last_saved = max(int(line[1]) for line in words if line[0] == "saved")
        started, child = next((int(line[1]), int(line[2])) for line in reversed(words) if line[0] == "started")
        deadline = time.monotonic() + 20
        while child and is_running(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not child or not is_running(child)
        assert last_saved <= load_latest(tmp_path / "run") <= started + 1
        first = started + 2


def test_a_child_killed_at_any_moment(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    chosen = random.Random(8)
    command = [tmp_path / "trainer.py", tmp_path / "run", "child", 1, 0]
    with warm_processes.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        num_failed, killed, last_saved = 0, 0, 0
        while num_failed < NUM_KILLS:
            what, step, *rest = trainer.stdout.readline().split()
            if what == "failed":
                assert "the process that saves for this rank died" in " ".join(rest)
                num_failed += 1
            elif what == "saved":
                last_saved = int(step)
            elif int(rest[0]) != killed and last_saved > 2 and chosen.random() < 0.3:
                time.sleep(chosen.uniform(0, 0.03))
                killed = int(rest[0])
                os.kill(killed, signal.SIGKILL)
        trainer.kill()
    assert load_latest(tmp_path / "run") >= last_saved > 2
