"""Saves that are killed, or whose calls fail, at a chosen operation on files: a driver of ``file_faults.c``.

One process with that library preloaded has imported torch; it forks the ranks of each save, which takes milliseconds.
Run as a program this file is that process: it reads a case per line and answers with what became of each rank.
"""

import ctypes
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import StorageWriter

import torchtitan_ext as tte
from torchtitan_ext.errors import NoCheckpointError, StateRefusedError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.weights.writer import SafetensorsWriter

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Case:
    """One save of ``value`` into ``target``; at most one rank meets a fault.

    Attributes:
        root: The directory whose files are watched.
        at: Which call of ``rank`` on files under it, from 1; 0 for none.
        code: The errno with which it fails; 0: the process is killed there, and all others with it.
        is_late: Where that call is a rename: it takes effect, and fails all the same.
        after_seconds: All ranks are killed then, wherever they are.
        max_file_bytes: Where it is not 0, the tensors are saved as safetensors, in files of so many bytes.
        one_writer: Whether each of these has one writer.
    """

    root: str
    target: str
    value: int = 2
    world_size: int = 1
    rank: int = 0
    at: int = 0
    code: int = 0
    is_late: bool = False
    no_exchange: bool = False
    log: str = ""
    num_threads: int = 1
    num_rows: int = 40
    after_seconds: float = 0.0
    sync: bool = True
    max_file_bytes: int = 0
    one_writer: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks: "saved", "killed", or the text of an error; and how many calls each made."""

    ranks: list[str]
    num_calls: list[int]

    @property
    def has_saved(self) -> bool:
        return self.ranks == ["saved"] * len(self.ranks)


def state_of(value: int, world_size: int, num_rows: int = 40) -> dict[str, Any]:
    own = {f"rank_{rank}": torch.full((50,), float(value + rank)) for rank in range(world_size)}
    return {"w": torch.full((num_rows, 30), float(value)), "frozen": torch.arange(4000), "step": value, **own}


def tensors_of(value: int, world_size: int, num_rows: int = 40) -> dict[str, torch.Tensor]:
    """What of it safetensors hold."""
    state = state_of(value, world_size, num_rows)
    return {key: held for key, held in state.items() if isinstance(held, torch.Tensor)}


def loaded_value(path: Path, world_size: int, step: Any = None) -> int | str:
    """The value that a checkpoint holds in all its parts; "none" where there is no checkpoint, "mix" for two."""
    loaded = state_of(0, world_size)
    reader = None if step is not None else FileReader(path, "all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tte.load(loaded, path, step=step, storage_reader=reader, no_dist=True)
    except (NoCheckpointError, StateRefusedError):
        return "none"
    truth = state_of(loaded["step"], world_size)
    same = all(torch.equal(loaded[key], truth[key]) for key in truth if key != "step")
    return loaded["step"] if same else "mix"


class FaultServer:
    """The process that forks the ranks.

    Args:
        program: Another file that calls ``serve`` in the place of this one.
    """

    def __init__(self, folder: Path, program: str = __file__) -> None:
        library = folder / "file_faults.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # a program imports what tests do
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", program, str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )

    def run(self, case: Case) -> Outcome:
        return Outcome(**self.answer(case))

    def answer(self, question: Any) -> Any:
        """What the program answers to a dataclass."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(question)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        # It would not see the end of its input: processes that tests have forked meanwhile hold that open.
        self._process.kill()
        self._process.communicate()


def fast_folder() -> str:
    """Where a thousand saves take minutes; only what is killed, not what is lost with power, depends on it."""
    return tempfile.mkdtemp(prefix="tte_faults_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


# ---- the server ----


def serve(library: str, answer: Callable[[dict[str, Any], Any, str], Any]) -> None:
    """Answers each question, with the library of faults and a directory of its own."""
    torch.set_num_threads(1)
    faults = ctypes.CDLL(library)
    faults.tte_faults_count.restype = ctypes.c_long
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:  # what a first save imports and looks up costs most of a second
        tte.save(state_of(0, 1), folder, no_dist=True)
    for line in sys.stdin:
        scratch = tempfile.mkdtemp(prefix="tte_faults_scratch_")
        answers.write(json.dumps(answer(json.loads(line), faults, scratch)) + "\n")
        answers.flush()
        shutil.rmtree(scratch)


def run_case(question: dict[str, Any], faults: Any, scratch: str) -> dict[str, Any]:
    case = Case(**question)
    work = partial(save_as_rank, case=case, faults=faults, scratch=scratch)
    ranks, num_calls = ["killed"] * case.world_size, [0] * case.world_size
    for rank in fork_ranks(case.world_size, work, limit_seconds=case.after_seconds or math.inf):
        ranks[rank], num_calls[rank] = json.loads(Path(scratch, f"{rank}").read_text())
    return dataclasses.asdict(Outcome(ranks, num_calls))


def fork_ranks(
    world_size: int, work: Callable[[int], None], *, limit_seconds: float, spare_seconds: float = 0.0
) -> list[int]:
    """Forks the ranks, and returns those that were not killed.

    Args:
        work: What each rank does; never returns.
        limit_seconds: All are killed then.
        spare_seconds: How long the others live when one was killed.
    """
    children: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            work(rank)
        children[pid] = rank
    alive: list[int] = []
    deadline = time.monotonic() + limit_seconds
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            if os.WIFEXITED(status):
                alive.append(rank)
            else:
                deadline = min(deadline, time.monotonic() + spare_seconds)
        if time.monotonic() >= deadline:
            for other in children:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.001)
    return alive


def save_as_rank(rank: int, case: Case, faults: Any, scratch: str) -> None:
    """Never returns."""
    answer = "saved"
    try:
        if case.world_size > 1:
            store = dist.FileStore(f"{scratch}/store", case.world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=case.world_size, timeout=timedelta(seconds=300)
            )
        state = state_of(case.value, case.world_size, case.num_rows)
        if case.world_size > 1:
            state = {key: value for key, value in state.items() if key in ("w", "frozen", "step", f"rank_{rank}")}
        writer: StorageWriter = FileWriter(case.target, sync=case.sync, thread_count=case.num_threads)
        if case.max_file_bytes:
            state.pop("step")
            writer = SafetensorsWriter(
                case.target,
                max_file_bytes=case.max_file_bytes,
                one_writer_per_file=case.one_writer,
                thread_count=case.num_threads,
            )
        at = case.at if rank == case.rank else 0
        root, log = case.root.encode(), case.log.encode() if rank == case.rank else b""
        faults.tte_faults_arm(root, ctypes.c_long(at), case.code, int(case.is_late), int(case.no_exchange), log)
        tte.save(state, storage_writer=writer, no_dist=case.world_size == 1)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    count = faults.tte_faults_count()
    Path(scratch, f"{rank}").write_text(json.dumps([answer, count]))
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], run_case)
