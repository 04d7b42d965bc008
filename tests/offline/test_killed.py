"""Processes that are killed in the middle of an operation, and the memory that operations take."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_bits, save_as

import torchtitan_ext as tte
from torchtitan_ext.errors import WorkerLostError
from torchtitan_ext.offline.convert import convert
from torchtitan_ext.offline.diff import diff
from torchtitan_ext.offline.processes import Progress, run_tasks
from torchtitan_ext.offline.reshard import reshard
from torchtitan_ext.offline.sources import Source, open_source

Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {
    "reshard": lambda *args, **options: reshard(*args, mesh={"dp": 6}, **options),
    "hf": lambda *args, **options: convert(*args, to="hf", max_file_bytes=3 << 20, **options),
    "torch": lambda *args, **options: convert(*args, to="torch", **options),
}


def work_and_die(operation: Operation, source: Path, target: Path, num_processes: int, at: float) -> None:
    opened = open_source(source)
    num_left = [at * 12 * 1500 * 160 * 4]

    def progress(num_bytes: int) -> None:
        num_left[0] -= num_bytes
        if num_left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    operation(opened, target, num_processes=num_processes, max_bytes=12 << 20, overwrite=True, progress=progress)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_leaves_what_was_there_and_no_process(tmp_path: Path, name: str, at: float, num_processes: int) -> None:
    state = {f"w{number}": random_bits((1500, 160), torch.float32, number) for number in range(12)}
    source, target = save_as("dp=3", tmp_path / "a", state), tmp_path / "b"
    old = save_as("ours", tmp_path / "old", {"w": torch.ones(3)})
    OPERATIONS[name](open_source(old), target, num_processes=1)
    args = (OPERATIONS[name], source, target, num_processes, at)
    process = multiprocessing.get_context("fork").Process(target=work_and_die, args=args)
    process.start()
    workers: set[int] = set()
    while process.exitcode is None:
        workers |= set(descendants(process.pid or 0)) if process.is_alive() else set()
        time.sleep(0.002)
    assert process.exitcode == -signal.SIGKILL
    assert diff(open_source(old), open_source(target)).differences == ()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlive who started them"
        time.sleep(0.05)
    OPERATIONS[name](open_source(source), target, num_processes=1, overwrite=True)
    assert diff(open_source(source), open_source(target)).differences == ()
    assert sorted(os.listdir(tmp_path)) == ["a", "a-plain", "b", "old"]


def die_at_two(number: int, progress: Progress) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_is_killed_is_an_error() -> None:
    with pytest.raises(WorkerLostError, match="killed by signal 9"):
        run_tasks(die_at_two, 5, 2, lambda _: None)
    assert run_tasks(lambda number, _: number**2, 5, 2, lambda _: None) == [0, 1, 4, 9, 16]


PEAK = """
import json, re, resource, sys
from pathlib import Path
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.offline.reshard import reshard
from torchtitan_ext.offline.convert import convert
from torchtitan_ext.offline.diff import diff
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

source = open_source(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = peak()
options = {"num_processes": int(sys.argv[4]), "max_bytes": int(sys.argv[5])}
if sys.argv[3] == "reshard":
    reshard(source, sys.argv[2], mesh={"dp": 3, "tp": 2}, **options)
elif sys.argv[3] == "diff":
    diff(source, open_source(sys.argv[2]), values=True, max_bytes=options["max_bytes"])
else:
    convert(source, sys.argv[2], to=sys.argv[3], **options)
of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([1024 * before, 1024 * peak(), 1024 * of_children]))
"""


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [("reshard", 1), ("reshard", 2), ("hf", 2), ("torch", 1), ("torch", 2), ("dcp", 1), ("diff", 1)],
)
def test_memory_stays_below_the_bound_on_a_state_four_times_as_large(
    tmp_path: Path, name: str, num_processes: int
) -> None:
    max_bytes = 48 << 20
    state = {f"w{number}": random_bits((12 << 20,), torch.float32, number) for number in range(4)}
    source = save_as("ours", tmp_path / "a", state)
    if name == "diff":
        state["w3"] += 1
        save_as("torch", tmp_path / "b", state)
    del state
    command = [sys.executable, "-c", PEAK, source, tmp_path / "b", name, num_processes, max_bytes]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    before, own, of_children = json.loads(result.stdout)
    # Workers are forked: of them counts what they have above what the one that forked them had.
    used = own - before + (num_processes * (of_children - before) if num_processes > 1 else 0)
    print(f"{name}, {num_processes}: {used / 1e6:.0f} of {max_bytes / 1e6:.0f} MB")
    assert 0 < used < max_bytes


def test_a_hundred_thousand_keys(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.full((2,), float(number)) for number in range(100_000)}
    source = save_as("ours", tmp_path / "a", state)
    begin = time.perf_counter()
    reshard(open_source(source), tmp_path / "b", mesh={"dp": 2}, num_processes=1)
    convert(open_source(tmp_path / "b"), tmp_path / "c", to="hf", num_processes=1)
    convert(open_source(tmp_path / "c"), tmp_path / "d", to="torch", num_processes=1)
    changed: Source = open_source(tmp_path / "d")
    assert diff(open_source(source), changed).num_equal == len(state)
    print(f"{time.perf_counter() - begin:.1f} s")
    loaded = torch.load(tmp_path / "d", weights_only=True)
    assert tte.fingerprint(loaded) == tte.fingerprint(state)
