"""``kill -9``, or an error, at every operation on files of a save: the last good step is whole, and never a mix.

``make soak`` kills at every operation of every rank of 1, 2 and 4, and at many random times; the suite at every operation
of one rank, and some of two.
"""

import errno
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from file_faults import SOAK, Case, FaultServer, Outcome, fast_folder, loaded_value, skip_or_fail

WORLD_SIZES = (1, 2) if SOAK == 1 else (1, 2, 4)
NUM_RANDOM_KILLS = 8 if SOAK == 1 else 50 * SOAK


@dataclass(frozen=True)
class Scenario:
    """A save into ``step-2``, or over ``step-1``; with a file of others in the target it commits in place."""

    name: str
    is_over: bool
    has_foreign: bool
    no_exchange: bool = False


SCENARIOS = [
    Scenario("fresh, staged", False, False),
    Scenario("fresh, in place", False, True),
    Scenario("over, staged", True, False),
    Scenario("over, in place", True, True),
    Scenario("over, no exchange", True, False, no_exchange=True),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        skip_or_fail("no C compiler, which the library that injects faults needs")
    made = FaultServer(tmp_path_factory.mktemp("library"))
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(fast_folder())
    yield path
    shutil.rmtree(path)


class Field:
    """A run with a good ``step-1``, made anew for each case, and what must hold after it."""

    def __init__(self, server: FaultServer, folder: Path, scenario: Scenario, world_size: int) -> None:
        self.server, self.scenario, self.world_size = server, scenario, world_size
        self.run = folder / "run"
        self.template = folder / "template"
        self.target = self.run / ("step-1" if scenario.is_over else "step-2")
        (self.template / "step-1").mkdir(parents=True)
        if scenario.has_foreign:
            (self.template / "step-1" / "config.json").write_text("{}")
        first = self.case(self.template, self.template / "step-1", value=1)
        assert server.run(first).has_saved
        if scenario.has_foreign and not scenario.is_over:
            (self.template / "step-2").mkdir()
            (self.template / "step-2" / "config.json").write_text("{}")

    def case(self, root: Path, target: Path, **options: object) -> Case:
        return Case(
            str(root), str(target), world_size=self.world_size, no_exchange=self.scenario.no_exchange, **options
        )

    def save(self, **options: object) -> Outcome:
        if self.run.exists():
            shutil.rmtree(self.run)
        shutil.copytree(self.template, self.run)
        return self.server.run(self.case(self.run, self.target, **options))

    def check(self, outcome: Outcome) -> int:
        """That one of the two is there, whole; that a save can follow, and clears away what was left. Which it was."""
        found = loaded_value(self.run, self.world_size, "last-good")
        at_target = loaded_value(self.target, self.world_size)
        assert found in (1, 2) and at_target == (found if self.scenario.is_over or found == 2 else "none")
        assert found == 2 or not outcome.has_saved
        assert self.server.run(self.case(self.run, self.target, value=3)).has_saved
        assert loaded_value(self.target, self.world_size) == 3
        assert sorted(os.listdir(self.run)) == sorted({"step-1", self.target.name})
        names = os.listdir(self.target)
        is_in_place = self.scenario.has_foreign or self.scenario.no_exchange
        assert len(names) == 2 + self.world_size + self.scenario.has_foreign, names
        assert any(".tte_index." in name for name in names) == is_in_place, names
        return int(found)


def points(num_calls: int, rank: int, world_size: int) -> list[int]:
    """At which calls a rank is killed: at all, but in the suite of several ranks at a few."""
    every = range(1, num_calls + 1)
    if SOAK > 1 or world_size == 1:
        return list(every)
    return sorted(random.Random(rank).sample(every, min(4, num_calls)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_kill_at_every_operation(
    server: FaultServer, folder: Path, scenario: Scenario, world_size: int, record_property: object
) -> None:
    field = Field(server, folder, scenario, world_size)
    whole = field.save()
    assert whole.has_saved and field.check(whole) == 2
    found = []
    for rank in range(world_size):
        assert whole.num_calls[rank] >= (20 if rank == 0 else 3)
        for at in points(whole.num_calls[rank], rank, world_size):
            outcome = field.save(rank=rank, at=at)
            assert outcome.ranks[rank] == "killed"
            found.append(field.check(outcome))
    print(f"{scenario.name}, {world_size} rank(s): {len(found)} kills, {found.count(2)} after the commit")
    assert found.count(1) > 0 and (found.count(2) > 0 or world_size > 1)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_kill_at_random_times(server: FaultServer, folder: Path, scenario: Scenario) -> None:
    chance = random.Random(scenario.name)
    world_size = 2
    field = Field(server, folder, scenario, world_size)
    found = []
    for _ in range(NUM_RANDOM_KILLS):
        outcome = field.save(after_seconds=chance.uniform(0.02, 0.25))
        found.append(field.check(outcome))
    print(f"{scenario.name}: {len(found)} kills at random times, {found.count(2)} after the commit")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=lambda code: errno.errorcode[code])
def test_an_error_at_every_operation(server: FaultServer, folder: Path, scenario: Scenario, code: int) -> None:
    field = Field(server, folder, scenario, 1)
    num_calls = field.save().num_calls[0]
    errors = 0
    for at in range(1, num_calls + 1):
        outcome = field.save(at=at, code=code)
        if not outcome.has_saved:
            errors += 1
            assert os.strerror(code) in outcome.ranks[0] and len(outcome.ranks[0].splitlines()) <= 5, outcome
        field.check(outcome)
    print(f"{scenario.name}, {errno.errorcode[code]}: {num_calls} calls failed, {errors} of them failed the save")
    assert errors >= 10


@pytest.mark.parametrize("num_threads", range(1, 9))
def test_a_write_that_fails_in_any_thread_fails_the_save(server: FaultServer, folder: Path, num_threads: int) -> None:
    log = folder / "log"
    case = Case(str(folder / "run"), str(folder / "run" / "step-1"), num_threads=num_threads, num_rows=80_000)
    assert server.run(Case(**(case.__dict__ | {"log": str(log)}))).has_saved
    lines = [line for line in log.read_bytes().split(b"\n") if line.split(b"\t")[0] in OPERATIONS]
    writes = [number for number, line in enumerate(lines, 1) if line.startswith(b"write\t") and b".distcp" in line]
    assert len(writes) >= 10  # nine megabytes in blocks of one, and the footer
    for at in writes:
        shutil.rmtree(folder / "run")
        (outcome,) = server.run(Case(**(case.__dict__ | {"at": at, "code": errno.ENOSPC}))).ranks
        assert "cannot write at byte" in outcome and "__0_0.distcp" in outcome and "No space left" in outcome
        assert os.listdir(folder / "run") == []


OPERATIONS = {b"create", b"append", b"write", b"fsync", b"rename", b"exchange", b"unlink", b"rmdir", b"mkdir"}
