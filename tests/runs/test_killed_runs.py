"""Random runs of `CheckpointManager` whose jobs are killed, or whose disk refuses, against a plain account of them.

The account has all *worlds* that a run may be in: a save that was killed in the middle has committed or not, and has
removed some of the old steps. A look between jobs says which of them it is, and none is a defect.
"""

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from file_faults import fast_folder
from killed_jobs import Begin, Fault, Flip, Job, JobServer, Look, Refusal
from missing_tools import skip_or_fail
from mounts import why_forbidden
from tier import SEED, SOAK, TIER

NUM_RUNS = 20 * SOAK
WORLD_SIZES = [1, 1, 1, 2] if TIER == "commit" else [*[1] * 9, *[2] * 8, *[4] * 2, 8]
KINDS = ["call", "call", "call", "error", *(["moment"] if TIER == "soak" else [])]

SEEDS_AT_COMMIT = ["0 0", "0 1"]


class Step(NamedTuple):
    """A finished step in one of the directories of a run.

    Attributes:
        job: Which job saved it.
        is_good: Whether no byte of it was flipped.
        counts: Whether it is one of the newest that `keep` counts: it reads tables, and of data the sizes.
        is_left: Whether the run was set back below it: it may lie there until a save below moves it.
    """

    place: str
    number: int
    job: int
    is_good: bool = True
    counts: bool = True
    is_left: bool = False


World = frozenset[Step]


@dataclass
class Save:
    """What the journals of a job's ranks say of one save.

    Attributes:
        place: Where some rank was told that it is; empty where none was.
        is_open: Whether its end is not known: a rank was killed, or a call of it failed.
        left: What lay in the run after it that is no part of a step; told of a save that was refused.
    """

    number: int
    place: str = ""
    is_open: bool = False
    is_refused: bool = False
    is_faulty: bool = False
    ends: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Account:
    """Which worlds a run may be in, and which of its directories no dead save may have left anything in."""

    def __init__(self) -> None:
        self.worlds: set[World] = {frozenset()}
        self.is_clean = {"run": True, "fallback": True}

    def resume(self, job: Job, told: dict[str, Any] | None) -> None:
        """Keeps the worlds in which a job resumes as it did: at a step and a job's values, or at none that is good."""
        found = None if told is None else (told["step"], told["job"])
        left = {
            world
            for world in self.worlds
            if resumed_in(world, job.set_back) == found and (told is None or is_listed(world, told["steps"]))
        }
        expected = [(resumed_in(world, job.set_back), sorted(world)) for world in self.worlds]
        assert left, f"resumed at {told}, expected one of {expected}"
        self.worlds = left

    def save(self, job: Job, save: Save) -> None:
        places = ["run", "fallback"] if job.has_fallback else ["run"]
        for place in places if save.is_open else []:
            # What fails after its rename, at the sync, is tried again elsewhere, and then lies in both.
            self._commit(job, Step(place, save.number, job.number), is_cut=True, may_fail=place != save.place)
        if save.place and not save.is_open:
            self._commit(job, Step(save.place, save.number, job.number), is_cut=False, may_fail=False)
        if save.is_open:
            self.is_clean = dict.fromkeys(self.is_clean, False)
        elif save.place:
            self.is_clean[save.place] = True
        assert not save.left or not self.is_clean["run"], f"a save that was refused has left {save.left}"

    def _commit(self, job: Job, step: Step, *, is_cut: bool, may_fail: bool) -> None:
        after = {after for world in self.worlds for after in committed(world, step, job, is_cut=is_cut)}
        self.worlds = after | (self.worlds if may_fail else set())

    def end(self, steps: list[int]) -> None:
        """What the manager lists at the end of a job."""
        left = {world for world in self.worlds if is_listed(world, steps)}
        assert left, f"listed {steps}, expected one of {[sorted(world) for world in self.worlds]}"
        self.worlds = left

    def look(self, looked: dict[str, Any]) -> None:
        left = {world for world in self.worlds if is_seen(world, looked)}
        assert left, f"got {looked}, expected one of {[sorted(world) for world in self.worlds]}"
        self.worlds = {
            frozenset(step for step in world if str(step.number) in looked[step.place]["steps"]) for world in left
        }
        for place, found in looked.items():
            assert not found["strange"] or not self.is_clean[place], f"{place}: dead saves have left {found['strange']}"

    def damage(self, step: Step, is_data: bool) -> None:
        self.worlds = {
            frozenset(
                one._replace(is_good=False, counts=is_data and one.counts) if one[:3] == step[:3] else one
                for one in world
            )
            for world in self.worlds
        }

    @property
    def known(self) -> World:
        return min(self.worlds, key=sorted)


def living(world: World) -> dict[int, Step]:
    """By number; of a step in both directories that of the run."""
    order = sorted((step for step in world if not step.is_left), key=lambda step: step.place)
    return {step.number: step for step in order}


def resumed_in(world: World, set_back: int | None) -> tuple[int, int] | None:
    steps = living(world)
    if set_back is not None:
        return set_back, steps[set_back].job
    good = [step for step in steps.values() if step.is_good]
    newest = max(good, key=lambda step: step.number, default=None)
    return (0, 0) if not world else None if newest is None else (newest.number, newest.job)


def committed(world: World, new: Step, job: Job, *, is_cut: bool) -> Iterator[World]:
    """The worlds after a commit; with a cut, those after any part of what follows it."""
    others = {step for step in world if step[:2] != new[:2]}
    newer = {step for step in others if step.number > new.number}
    moved = {step._replace(is_left=True) for step in newer} if is_cut else set()
    after = (others - newer) | moved | {new}
    keep, keep_every = job.options.get("keep"), job.options.get("keep_every")
    own = [step for step in after if step.place == new.place and not step.is_left and step.number <= new.number]
    own.sort(key=lambda step: -step.number)
    old: list[Step] = []
    num_counted = 0
    for step in own if keep is not None else []:
        if num_counted < keep:
            num_counted += step.counts
        elif keep_every is None or step.number % keep_every:
            old.append(step)
    for num_removed in range(len(old) + 1) if is_cut else [len(old)]:
        yield frozenset(after - set(old[:num_removed]))


def is_listed(world: World, steps: list[int]) -> bool:
    return set(living(world)) <= set(steps) <= {step.number for step in world} and steps == sorted(steps)


def is_seen(world: World, looked: dict[str, Any]) -> bool:
    """Whether all steps lie where they should, the good ones with their values, and no others."""
    keys = {(place, int(number)): held for place, found in looked.items() for number, held in found["steps"].items()}
    if keys.keys() - {step[:2] for step in world}:
        return False
    for step in world:
        held = keys.get(step[:2])
        if held is None and not step.is_left:
            return False
        if held is not None and step.is_good and held != [step.number, step.job]:
            return False
    return True


# ---- what ranks tell ----


def saves_of(job: Job, journals: list[list[dict[str, Any]]]) -> list[Save]:
    saves: dict[int, Save] = {}
    fault = job.fault
    for rank, journal in enumerate(journals):
        begun: dict[int, int] = {}
        for line in journal:
            if line["what"] == "began":
                save = saves.setdefault(line["step"], Save(line["step"], is_refused=bool(line["refusals"])))
                begun[line["step"]] = line["calls"]
            elif line["what"] == "ended":
                save = saves[line["step"]]
                save.ends.append(line)
                path = Path(line["path"])
                if line["path"]:
                    assert path.name == f"step-{save.number}"
                    save.place = "fallback" if path.is_relative_to(Path(job.folder) / "other") else "run"
                last = save
                if fault is not None and fault.rank == rank and begun[line["step"]] < fault.at <= line["calls"]:
                    save.is_faulty = True
            elif line["what"] == "left":
                last.left = line["strange"]
    has_died = any({"what": "alive"} not in journal for journal in journals)
    for number, save in saves.items():
        is_last = number == max(saves)
        save.is_open = save.is_faulty or len(save.ends) < job.world_size or (is_last and has_died)
    return [saves[number] for number in sorted(saves)]


def check_ends(job: Job, save: Save, has_died: bool) -> None:
    """What a save may answer: all ranks the same, and an error only where storage has refused, as `on_error` says."""
    answers = {(end["path"], end["error"], end.get("raised", "")) for end in save.ends}
    assert len(answers) <= 1 or has_died, f"ranks disagree: {answers}"
    for path, error, raised in answers:
        if has_died and save.is_open:
            continue  # the ranks that live tell of the one that does not
        assert bool(path) + bool(error) + bool(raised) == 1
        assert path or save.is_refused or save.is_faulty, f"a save failed, and nothing refused it: {error or raised}"
        assert not raised or job.options["on_error"] == "raise", raised
        assert not error or (job.options["on_error"] == "warn" and "nothing was saved" in error), error
        assert path or not job.has_fallback or save.is_faulty, f"the fallback was not taken: {error or raised}"


def check_refusals(job: Job, saves: list[Save]) -> None:
    """What storage refuses for sure was not saved in the run."""
    for refusal in job.refusals:
        if refusal.save < len(saves) and (refusal.free_pages == 0 and (refusal.kind == "full" or 0 in refusal.ranks)):
            assert saves[refusal.save].place in ("", "fallback")


# ---- random runs ----


def random_job(draw: random.Random, folder: Path, number: int, has_fallback: bool, world: World) -> Job:
    world_size = draw.choice(WORLD_SIZES)
    keep = draw.choice([None, 1, 2, 2, 3])
    options = {
        "every": draw.choice([1, 1, 2, 3]),
        "keep": keep,
        "keep_every": None if keep is None else draw.choice([None, None, 3, 4]),
        "asynchronous": draw.random() < 0.5,
        "on_error": draw.choice(["raise", "warn"]),
        "retries": draw.choice([0, 0, 1]),
        "max_failures": 9,
    }
    fault = None
    good = [step.number for step in living(world).values() if step.is_good]
    set_back = draw.choice(good) if good and draw.random() < 0.2 else None
    if draw.random() < 0.65:
        rank = draw.choice([0, draw.randrange(world_size)])
        kind = draw.choice(KINDS)
        at = 0 if kind == "moment" else draw.randint(1, 55 if rank == 0 else 8)
        code = draw.choice([errno.ENOSPC, errno.EIO, errno.EROFS]) if kind == "error" else 0
        # The first save of a run that is set back leaves steps behind.
        fault = Fault(
            0 if set_back else draw.randrange(3),
            rank,
            at,
            code,
            draw.uniform(0, 0.08),
            draw.choice([0.0, 0.0, 0.05, 0.5]),
        )
    refusals = []
    if not why_forbidden() and draw.random() < 0.4:
        for save in sorted({draw.randrange(4), draw.randrange(4)}):
            ranks = draw.choice([[0], [draw.randrange(world_size)], list(range(world_size))])
            kind = draw.choice(["full", "read_only"])
            refusals.append(Refusal(save, kind, ranks, draw.choice([0, 1, 3, 6, 9]) if kind == "full" else 0))
    return Job(str(folder), number, world_size, options, has_fallback, draw.randint(2, 7), set_back, fault, refusals)


def run_one(server: JobServer, folder: Path, seed: str, counts: Counter[str]) -> None:
    draw = random.Random(seed)
    account, has_fallback = Account(), draw.random() < 0.4
    server.ask(Begin(str(folder)))
    for number in range(1, draw.randint(3, 5)):
        job = random_job(draw, folder, number, has_fallback, account.known)
        journals = server.ask(job)
        try:
            can_go_on = check_job(account, job, journals, counts)
            account.look(server.ask(Look(str(folder))))
        except AssertionError as error:
            raise AssertionError(f"run {seed}, {job}: {error}; {journals}") from None
        if not can_go_on:
            counts["runs without a good step"] += 1
            return
        steps = living(account.known)
        if steps and draw.random() < 0.4:
            flip_in(server, folder, account, steps[max(steps)], draw)
            counts["flips"] += 1


def check_job(account: Account, job: Job, journals: list[list[dict[str, Any]]], counts: Counter[str]) -> bool:
    """Checks what the ranks tell; returns false where the run has no good step any more."""
    lines = [line for journal in journals for line in journal]
    has_died = any({"what": "alive"} not in journal for journal in journals)
    raised = [line["error"] for line in lines if line["what"] == "raised"]
    assert has_died or not raised, raised
    counts["jobs"] += 1
    counts["killed"] += has_died
    resumed = [line for line in lines if line["what"] == "resumed"]
    if any(line["what"] == "none good" for line in lines):
        assert not resumed
        account.resume(job, None)
        return False
    assert has_died or len(resumed) == job.world_size
    for line in resumed:
        assert line["is_same"], "what was loaded is no save's"
        assert line == resumed[0]
        account.resume(job, line)
    saves = saves_of(job, journals)
    check_refusals(job, saves)
    for save in saves:
        check_ends(job, save, has_died)
        account.save(job, save)
        counts["saves"] += 1
        counts["open saves"] += save.is_open
        counts["refused saves"] += save.is_refused
        counts["saves in the fallback"] += save.place == "fallback"
    for line in lines:
        if line["what"] == "done":
            account.end(line["steps"])
    return True


def flip_in(server: JobServer, folder: Path, account: Account, step: Step, draw: random.Random) -> None:
    if any(one.is_left for one in account.known):
        return  # the table of a step may be all that says that another one was left
    place = folder / "disk" / "run" if step.place == "run" else next((folder / "other").iterdir())
    name = server.ask(Flip(str(place / f"step-{step.number}"), draw.randrange(1 << 30)))
    account.damage(step, name.endswith(".distcp"))


@pytest.fixture(scope="module")
def job_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        skip_or_fail("no C compiler, which the library that injects faults needs")
    made = JobServer(tmp_path_factory.mktemp("library"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(fast_folder())
    yield path
    shutil.rmtree(path)


def test_two_runs_that_are_killed(job_server: JobServer, folder: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS_AT_COMMIT:
        run_one(job_server, folder, seed, counts)
    assert counts["killed"] and counts["open saves"], counts


@pytest.mark.nightly("kills")
@pytest.mark.parametrize("first", range(0, NUM_RUNS, 20))
def test_random_runs_that_are_killed(job_server: JobServer, folder: Path, first: int) -> None:
    counts: Counter[str] = Counter()
    for run in range(first, first + 20):
        run_one(job_server, folder, f"{SEED} {run}", counts)
    print(dict(counts))
    assert counts["killed"] and counts["open saves"]
