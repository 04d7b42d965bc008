"""Processes that end while threads of the package ask a store."""

import subprocess
import sys

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
