"""Processes that end while threads of the package ask a store."""

import subprocess
import sys
from pathlib import Path

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
        assert (done.returncode, done.stderr) == (0, b"")

SAVE = """
import sys
import torch
import torch.distributed as dist
import torchtitan_ext as tte

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
save = tte.async_save({"weight": torch.ones(1 << 22)}, f"{folder}/checkpoint", fingerprints=True)
if rank == 1:
    dist.destroy_process_group()
try:
    save.result()
except RuntimeError as error:
    print(error)
"""


def test_a_group_that_is_destroyed_while_a_save_runs(tmp_path: Path) -> None:
    """The rank does not take itself for the only one."""
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", SAVE, str(rank), str(tmp_path)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert texts[0] == texts[1]
    assert "rank 1: RuntimeError: destroy_process_group was called before the save had ended" in texts[0]
    assert not (tmp_path / "checkpoint" / ".metadata").exists()
