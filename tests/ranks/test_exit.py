"""Processes that end while threads of the package ask a store."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import CheckpointFailedError

PROGRAM = """
import threading, time
import torch.distributed as dist
from torchtitan_ext.threads import BackgroundThread

store, ended = dist.TCPStore("127.0.0.1", 0, 1, True), threading.Event()

def ask():
    while not ended.is_set():
        store.add("asked", 1)

BackgroundThread("asking", ask, end=ended.set)
while store.add("asked", 0) < 100:
    time.sleep(0.01)
"""


def test_a_thread_in_a_store_does_not_abort_the_process() -> None:
    """Without being ended before Python it would, nearly each time."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr


SAVE = """
import sys
import torch
import torch.distributed as dist
import torchtitan_ext as tte

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
manager = tte.CheckpointManager(f"{folder}/run")
manager.save({"weight": torch.ones(1 << 22), "lr": 0.1}, 1)
dist.destroy_process_group()
"""


def test_a_save_outlives_its_process_group(tmp_path: Path) -> None:
    """A script that destroys the group at its end, and neither waits nor closes, has its last step."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE) for rank in range(2)]
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    loaded = {"weight": torch.zeros(1 << 22), "lr": 0.0}
    tte.load(loaded, str(tmp_path / "run" / "step-1"))
    assert loaded["weight"].eq(1).all()
    assert loaded["lr"] == 0.1


def destroy_in_a_phase(rank: int, world_size: int, folder: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    with Phases("save", path=folder) as phases, pytest.raises(CheckpointFailedError) as caught:
        phases.on_all("plan", dist.destroy_process_group)
    return str(caught.value)


def test_a_group_that_a_phase_needs(run_world: Callable[..., Any], tmp_path: Path) -> None:
    (text,) = run_world(1, destroy_in_a_phase, str(tmp_path), process_group=False)
    assert "destroy_process_group was called before the save had ended" in text
