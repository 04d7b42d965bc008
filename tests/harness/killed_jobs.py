"""Jobs of a run by a CheckpointManager whose ranks are killed, or whose disk refuses saves, each told as a journal.

Run as a program this file is the server that forks the ranks (``file_faults.py``). Where mounts are allowed, its runs
lie on a small disk that only it sees: so it also looks at the run, and flips bytes there, when it is asked to.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import flip_byte
from file_faults import FaultServer, fork_ranks, serve
from mounts import mount_disk, own_mounts, read_only, why_forbidden
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, NoCheckpointError
from torchtitan_ext.storage.runs.listing import find_leftovers

PAGE_BYTES = 4096
DISK_BYTES = 2 << 20
NOT_OURS = "notes.txt"
"""A file in each run: a run in which there is nothing may be on a disk that is not mounted."""

_IN_STEP = re.compile(r"\.metadata|\.tte_index|__\d+_0\.distcp")


@dataclass(frozen=True)
class Fault:
    """What one rank meets in a save or after it.

    Attributes:
        save: In which save of the job, from 0.
        at: At which call on files after its begin; 0: after ``seconds``.
        code: The errno with which the call fails; 0: the rank is killed.
        spare_seconds: How long the other ranks live when one was killed.
    """

    save: int
    rank: int
    at: int = 0
    code: int = 0
    seconds: float = 0.0
    spare_seconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """One save of a job, from 0, for which the disk is read-only on some ranks, or but for some pages full."""

    save: int
    kind: str
    ranks: list[int] = field(default_factory=list)
    free_pages: int = 0


@dataclass(frozen=True)
class Job:
    """One job of a run: resumes, trains, and saves at its steps.

    Attributes:
        folder: The run is ``disk/run`` in it, and its fallback ``other``.
        options: Of the manager, but the fallback.
        set_back: The step at which it resumes; ``None`` for the newest good one.
    """

    folder: str
    number: int
    world_size: int
    options: dict[str, Any]
    has_fallback: bool
    num_steps: int
    set_back: int | None = None
    fault: Fault | None = None
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True)
class Begin:
    """A new run."""

    folder: str


@dataclass(frozen=True)
class Look:
    """What is in a run between jobs."""

    folder: str


@dataclass(frozen=True)
class Flip:
    """Flips a byte of some file of a step."""

    step: str
    draw: int


QUESTIONS = {kind.__name__: kind for kind in (Job, Begin, Look, Flip)}


@dataclass(frozen=True)
class Question:
    """One of them on its way to the server."""

    kind: str
    content: dict[str, Any]


class JobServer(FaultServer):
    """The process that runs jobs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, __file__)

    def ask(self, question: Job | Begin | Look | Flip) -> Any:
        """Of a job the journals of its ranks, of a look ``looked``, of a flip the name of the file."""
        return self.answer(Question(type(question).__name__, dataclasses.asdict(question)))


def state_of(step: int, job: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """What a job saves at a step: rows that no number of ranks divides."""
    w: torch.Tensor = torch.arange(11 * 30).reshape(11, 30) + 1000.0 * step + 400_000 * job
    if mesh is not None:
        w = tte.full.distribute_tensor(w, mesh, [Shard(0)])
    return {"w": w, "plain": torch.full((50,), step + 1000 * job), "step": step, "job": job}


def is_right(state: dict[str, Any], mesh: DeviceMesh | None) -> bool:
    """Whether all values are those of one save."""
    truth = state_of(state["step"], state["job"], mesh)
    return torch.equal(state["plain"], truth["plain"]) and torch.equal(_local(state["w"]), _local(truth["w"]))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- the ranks ----


def run_job(job: Job, faults: Any, scratch: str) -> list[list[dict[str, Any]]]:
    (Path(job.folder) / "disk" / "filler").unlink(missing_ok=True)
    work = partial(run_rank, job=job, faults=faults, scratch=scratch)
    spare = 0.0 if job.fault is None else job.fault.spare_seconds
    alive = fork_ranks(job.world_size, work, limit_seconds=math.inf, spare_seconds=spare)
    journals = [
        [json.loads(line) for line in Path(scratch, f"{rank}.journal").read_text().splitlines()]
        for rank in range(job.world_size)
    ]
    for rank in alive:
        journals[rank].append({"what": "alive"})
    return journals


def run_rank(rank: int, job: Job, faults: Any, scratch: str) -> None:
    """Never returns."""
    journal = os.open(f"{scratch}/{rank}.journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, **details: Any) -> None:
        os.write(journal, (json.dumps({"what": what, **details}) + "\n").encode())

    try:
        with own_mounts() if job.refusals else contextlib.nullcontext():
            if job.world_size > 1:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(f"{scratch}/store", job.world_size),
                    rank=rank,
                    world_size=job.world_size,
                    timeout=timedelta(seconds=300),
                )
            train(rank, job, faults, note)
    except BaseException as error:
        note("raised", error=f"{type(error).__name__}: {error}")
    os._exit(0)


def train(rank: int, job: Job, faults: Any, note: Callable[..., None]) -> None:
    folder = Path(job.folder)
    mesh = init_device_mesh("cpu", (job.world_size,)) if job.world_size > 1 else None
    fallback = folder / "other" if job.has_fallback else None
    manager = tte.CheckpointManager(folder / "disk" / "run", fallback=fallback, **job.options)
    state = state_of(0, 0, mesh)
    try:
        first = manager.resume(state, step=job.set_back)
    except NoCheckpointError as error:
        note("none good", error=str(error))
        return
    is_same = first == state["step"] and is_right(state, mesh)
    note("resumed", step=first, job=state["job"], is_same=is_same, steps=manager.steps())
    faults.tte_faults_arm(job.folder.encode(), 0, 0, 0, 0, b"")
    pending: list[int] = []

    def finish() -> None:
        for step in pending:
            try:
                result = manager.wait()
                assert result is not None
                told = {"path": result.path, "error": result.error}
            except CheckpointFailedError as error:
                told = {"path": "", "error": "", "raised": str(error)}
            note("ended", step=step, calls=faults.tte_faults_count(), **told)
        pending.clear()

    saves = [step for step in range(first + 1, first + 1 + job.num_steps) if manager.should_save(step)]
    for number, step in enumerate(saves):
        finish()
        refusals = [refusal for refusal in job.refusals if refusal.save == number]
        with refusing(rank, refusals, folder / "disk", mesh):
            if job.fault is not None and (job.fault.save, job.fault.rank) == (number, rank):
                arm(job.fault, job.folder, faults)
            note("began", step=step, calls=faults.tte_faults_count(), refusals=[one.kind for one in refusals])
            try:
                manager.save(state_of(step, job.number, mesh), step)
                pending.append(step)
            except CheckpointFailedError as error:
                note("ended", step=step, calls=faults.tte_faults_count(), path="", error="", raised=str(error))
            if refusals:
                finish()
                barrier(mesh)
                note("left", strange=strange_in(folder / "disk" / "run"))
    finish()
    manager.close()
    barrier(mesh)
    note("done", steps=manager.steps())
    barrier(mesh)


def arm(fault: Fault, folder: str, faults: Any) -> None:
    faults.tte_faults_arm(folder.encode(), fault.at, fault.code, 0, 0, b"")
    if fault.at == 0:
        threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def barrier(mesh: DeviceMesh | None) -> None:
    if mesh is not None:
        dist.barrier()


@contextlib.contextmanager
def refusing(rank: int, refusals: list[Refusal], disk: Path, mesh: DeviceMesh | None) -> Iterator[None]:
    """Collective."""
    filler = disk / "filler"
    with contextlib.ExitStack() as stack:
        for refusal in refusals:
            if refusal.kind == "full" and rank == 0:
                fill(filler, refusal.free_pages)
            elif refusal.kind == "read_only" and rank in refusal.ranks:
                stack.enter_context(read_only(disk / "run"))
        if refusals:
            barrier(mesh)
        yield
        if refusals:
            barrier(mesh)
    if rank == 0 and any(refusal.kind == "full" for refusal in refusals):
        try:
            filler.unlink(missing_ok=True)
        except OSError:  # the fault of this job, which strikes once, was meant for a save
            filler.unlink(missing_ok=True)
    if refusals:
        barrier(mesh)


def fill(filler: Path, free_pages: int) -> None:
    with filler.open("wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while True:
                stream.write(bytes(16 * PAGE_BYTES))
        with contextlib.suppress(OSError):
            while True:
                stream.write(bytes(PAGE_BYTES))
        stream.truncate(max(0, stream.tell() - free_pages * PAGE_BYTES))


# ---- looks ----


def look(question: Look) -> dict[str, Any]:
    """By place, the steps by number with what is in them, and all that is no part of a step."""
    folder = Path(question.folder)
    places = {"run": folder / "disk" / "run"}
    for place in (folder / "other").iterdir():  # the folder of the one run
        places["fallback"] = place
    return {name: {"steps": steps_in(place), "strange": strange_in(place)} for name, place in places.items()}


def steps_in(place: Path) -> dict[int, Any]:
    """The step and the job whose values a checkpoint has, or why it cannot be loaded."""
    found: dict[int, Any] = {}
    for path in place.iterdir():
        if not path.name.startswith("step-"):
            continue
        state = state_of(0, 0, None)
        try:
            tte.load(state, path, no_dist=True)
            found[int(path.name[5:])] = [state["step"], state["job"]] if is_right(state, None) else "other values"
        except Exception as error:
            found[int(path.name[5:])] = f"{type(error).__name__}: {error}"
    return found


def strange_in(place: Path) -> list[str]:
    """What no finished save leaves in a run."""
    steps = [path for path in place.iterdir() if path.name.startswith("step-")]
    steps += place.glob("abandoned/*/*")
    known = {*steps, place / NOT_OURS, place / "abandoned"}
    strange = {path for path in place.iterdir() if path not in known}
    strange |= {path for step in steps for path in step.iterdir() if not _IN_STEP.fullmatch(path.name)}
    strange |= {leftover.path for leftover in find_leftovers(place)}
    return sorted(str(path.relative_to(place)) for path in strange)


def flip(question: Flip) -> str:
    draw = random.Random(question.draw)
    file = draw.choice(sorted(Path(question.step).iterdir()))
    flip_byte(file, draw.randrange(file.stat().st_size))
    return file.name


def begin(question: Begin, disk: Path) -> None:
    shutil.rmtree(disk / "run", ignore_errors=True)
    (disk / "run").mkdir()
    (disk / "run" / NOT_OURS).write_text("of the run's owner")
    shutil.rmtree(Path(question.folder) / "other", ignore_errors=True)
    (Path(question.folder) / "other").mkdir()


def answer(told: dict[str, Any], faults: Any, scratch: str) -> Any:
    content = told["content"]
    if told["kind"] == "Job":
        content["fault"] = None if content["fault"] is None else Fault(**content["fault"])
        content["refusals"] = [Refusal(**refusal) for refusal in content["refusals"]]
    question = QUESTIONS[told["kind"]](**content)
    if isinstance(question, Job):
        return run_job(question, faults, scratch)
    if isinstance(question, Begin):
        disk = Path(question.folder) / "disk"
        if not disk.is_dir():
            disk.mkdir()
            if not why_forbidden():
                mount_disk(disk, str(DISK_BYTES))
        return begin(question, disk)
    return look(question) if isinstance(question, Look) else flip(question)


if __name__ == "__main__":
    with own_mounts() if not why_forbidden() else contextlib.nullcontext():
        serve(sys.argv[1], answer)
