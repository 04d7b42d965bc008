"""Processes that are killed in the middle of an operation."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_bits, save_as
from signals import children_by_its_end, die, wait_until_gone

from torchtitan_ext.errors import WorkerLostError
from torchtitan_ext.offline.compare.diff import diff
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.offline.workers import run_tasks
from torchtitan_ext.storage.progress import OnBytes

Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {
    "reshard": lambda *args, **options: reshard(*args, mesh={"dp": 6}, **options),
    "hf": lambda *args, **options: convert(*args, to="safetensors", max_file_bytes=3 << 20, **options),
}


def work_and_die(operation: Operation, source: Path, target: Path, num_processes: int, at: float) -> None:
    opened = open_source(source)
    num_left = [at * 12 * 1500 * 160 * 4]

    def progress(num_bytes: int) -> None:
        num_left[0] -= num_bytes
        if num_left[0] <= 0:
            die()

    operation(opened, target, num_processes=num_processes, max_bytes=12 << 20, overwrite=True, progress=progress)


AT_COMMIT = [("reshard", 0.5, 2), ("hf", 1.0, 1)]
CASES = [
    pytest.param(*case, marks=() if case in AT_COMMIT else pytest.mark.nightly("kills"))
    for case in itertools.product(OPERATIONS, (0.0, 0.5, 1.0), (1, 2))
]


@pytest.mark.parametrize(("name", "at", "num_processes"), CASES)
def test_a_kill_leaves_what_was_there_and_no_process(tmp_path: Path, name: str, at: float, num_processes: int) -> None:
    state = {f"w{number}": random_bits((1500, 160), torch.float32, number) for number in range(12)}
    source, target = save_as("dp=3", tmp_path / "a", state), tmp_path / "b"
    old = save_as("ours", tmp_path / "old", {"w": torch.ones(3)})
    OPERATIONS[name](open_source(old), target, num_processes=1)
    args = (OPERATIONS[name], source, target, num_processes, at)
    process = multiprocessing.get_context("fork").Process(target=work_and_die, args=args)
    process.start()
    workers = children_by_its_end(process)
    assert process.exitcode == -signal.SIGKILL
    assert diff(open_source(old), open_source(target)).differences == ()
    wait_until_gone(*workers)
    OPERATIONS[name](open_source(source), target, num_processes=1, overwrite=True)
    assert diff(open_source(source), open_source(target)).differences == ()
    assert sorted(os.listdir(tmp_path)) == ["a", "a-plain", "b", "old"]


def die_at_two(number: int, progress: OnBytes) -> int:
    if number == 2:
        die()
    return number


def test_a_process_that_ignores_the_end_of_its_children() -> None:
    """As a launcher may leave it to the programs that it starts: nobody hears of exit codes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_tasks(lambda number, _: number**2, 5, 2, lambda _: None) == [0, 1, 4, 9, 16]
        with pytest.raises(WorkerLostError, match="a worker process died; nothing was changed; try fewer processes"):
            run_tasks(die_at_two, 5, 2, lambda _: None)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_is_killed_is_an_error() -> None:
    with pytest.raises(WorkerLostError, match="killed by signal 9"):
        run_tasks(die_at_two, 5, 2, lambda _: None)
    assert run_tasks(lambda number, _: number**2, 5, 2, lambda _: None) == [0, 1, 4, 9, 16]
