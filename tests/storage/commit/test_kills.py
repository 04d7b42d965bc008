"""``kill -9``, or an error, at every operation on files of a save: the last good step is whole, and never a mix.

At commit a save is killed at a handful of them; at night at each operation of one rank, and at some of two; in the soak
at every operation of every rank of 1, 2 and 4, and at many random times.
"""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from fault_field import SCENARIOS, Field, Scenario
from file_faults import Case, FaultServer
from lossy_disk import read_log
from tier import SEED, SOAK, TIER, sampled

WORLD_SIZES = (1, 2) if SOAK == 1 else (1, 2, 4)
ERRORS = [errno.ENOSPC] if SOAK == 1 else [errno.ENOSPC, errno.EIO, errno.EROFS]
NUM_RANDOM_KILLS = 50 * SOAK


def points(num_calls: int, rank: int, world_size: int) -> list[int]:
    """At which calls a rank is killed: at all, but at night of several ranks at a few."""
    every = range(1, num_calls + 1)
    if SOAK > 1 or world_size == 1:
        return list(every)
    return sorted(random.Random(SEED + rank).sample(every, min(4, num_calls)))


@pytest.mark.parametrize("scenario", SCENARIOS[:4], ids=lambda scenario: scenario.name)
def test_kills_and_errors_around_the_commit(fault_server: FaultServer, fast_path: Path, scenario: Scenario) -> None:
    """At the first and the last operation, before and after the one that commits, and halfway to it."""
    field, log = Field(fault_server, fast_path, scenario, 1), fast_path / "log"
    assert field.save(log=str(log)).has_saved
    commit = call_of_commit(log)
    last = len(read_log(log))
    points = (1, commit // 2, commit, commit + 1, last)
    found = [field.check(field.save(at=at)) for at in points]
    assert found == [1, 1, 1, 2, 2]
    for at in (commit // 2, commit):
        outcome = field.save(at=at, code=errno.ENOSPC)
        assert os.strerror(errno.ENOSPC) in outcome.ranks[0] and len(outcome.ranks[0].splitlines()) <= 5, outcome
        assert field.check(outcome) == 1


def test_a_kill_of_one_of_two_ranks(fault_server: FaultServer, fast_path: Path) -> None:
    field = Field(fault_server, fast_path, SCENARIOS[2], 2)
    whole = field.save()
    assert whole.has_saved and field.check(whole) == 2
    for rank in range(2):
        outcome = field.save(rank=rank, at=whole.num_calls[rank] // 2)
        assert outcome.ranks[rank] == "killed" and field.check(outcome) == 1


def call_of_commit(log: Path) -> int:
    """Which call on files it is, from 1."""
    return max(number for number, call in enumerate(read_log(log), 1) if call.name in ("rename", "exchange"))


@pytest.mark.nightly("kills")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_kill_at_every_operation(
    fault_server: FaultServer, fast_path: Path, scenario: Scenario, world_size: int, record_property: object
) -> None:
    field = Field(fault_server, fast_path, scenario, world_size)
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


if TIER == "soak":  # what they meet depends on the machine's speed

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
    def test_kill_at_random_times(fault_server: FaultServer, fast_path: Path, scenario: Scenario) -> None:
        chance = random.Random(scenario.name)
        world_size = 2
        field = Field(fault_server, fast_path, scenario, world_size)
        found = []
        for _ in range(NUM_RANDOM_KILLS):
            outcome = field.save(after_seconds=chance.uniform(0.02, 0.25))
            found.append(field.check(outcome))
        print(f"{scenario.name}: {len(found)} kills at random times, {found.count(2)} after the commit")


@pytest.mark.nightly("kills")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
def test_an_error_at_every_operation(fault_server: FaultServer, fast_path: Path, scenario: Scenario, code: int) -> None:
    field = Field(fault_server, fast_path, scenario, 1)
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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_rename_that_takes_effect_and_fails_all_the_same_has_saved(
    fault_server: FaultServer, fast_path: Path, scenario: Scenario
) -> None:
    """As NFS and FUSE answer, late."""
    field = Field(fault_server, fast_path, scenario, 1)
    log = fast_path / "log"
    assert field.save(log=str(log)).has_saved
    names = [call.name for call in read_log(log)]
    commit = call_of_commit(log)
    outcome = field.save(at=commit, code=errno.EIO, is_late=True, log=str(log))
    assert outcome.has_saved and [call.name for call in read_log(log)] == names
    assert "fsync" in names[commit:] and field.check(outcome) == 2


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("num_threads", range(1, 9))
def test_a_write_that_fails_in_any_thread_fails_the_save(
    fault_server: FaultServer, fast_path: Path, num_threads: int
) -> None:
    log = fast_path / "log"
    case = Case(str(fast_path / "run"), str(fast_path / "run" / "step-1"), num_threads=num_threads, num_rows=80_000)
    assert fault_server.run(Case(**(case.__dict__ | {"log": str(log)}))).has_saved
    calls = enumerate(read_log(log), 1)
    writes = [number for number, call in calls if call.name == "write" and call.first.name == "__0_0.distcp"]
    assert len(writes) >= 10  # nine megabytes in blocks of one, and the footer
    for at in sampled(writes, 0.34, str(num_threads)):
        shutil.rmtree(fast_path / "run")
        (outcome,) = fault_server.run(Case(**(case.__dict__ | {"at": at, "code": errno.ENOSPC}))).ranks
        assert "cannot write at byte" in outcome and "__0_0.distcp" in outcome and "No space left" in outcome
        assert os.listdir(fast_path / "run") == []
