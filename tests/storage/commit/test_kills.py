"""``kill -9``, or an error, at every operation on files of a save: the last good step is whole, and never a mix.

``make soak`` kills at every operation of every rank of 1, 2 and 4, and at many random times; ``make test-full`` at each
operation of one rank, and some of two; ``make test`` at a quarter of these.
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
from tier import RUNS_ALL, SEED, SOAK, sampled

WORLD_SIZES = (1, 2) if SOAK == 1 else (1, 2, 4)
ERRORS = [errno.ENOSPC] if SOAK == 1 else [errno.ENOSPC, errno.EIO, errno.EROFS]
NUM_RANDOM_KILLS = 50 * SOAK if SOAK > 1 else 8 if RUNS_ALL else 2


def points(num_calls: int, rank: int, world_size: int) -> list[int]:
    """At which calls a rank is killed: at all, but in the suite of several ranks at a few."""
    every = range(1, num_calls + 1)
    if SOAK > 1:
        return list(every)
    # The last one lies behind the commit.
    if world_size == 1:
        return [*sampled(every[:-1], 0.25, str(num_calls)), num_calls]
    return sorted(random.Random(SEED + rank).sample(every, min(4 if RUNS_ALL else 1, num_calls)))


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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
def test_an_error_at_every_operation(fault_server: FaultServer, fast_path: Path, scenario: Scenario, code: int) -> None:
    field = Field(fault_server, fast_path, scenario, 1)
    num_calls = field.save().num_calls[0]
    errors = 0
    for at in sampled(range(1, num_calls + 1), 0.34, scenario.name):
        outcome = field.save(at=at, code=code)
        if not outcome.has_saved:
            errors += 1
            assert os.strerror(code) in outcome.ranks[0] and len(outcome.ranks[0].splitlines()) <= 5, outcome
        field.check(outcome)
    print(f"{scenario.name}, {errno.errorcode[code]}: {num_calls} calls failed, {errors} of them failed the save")
    assert errors >= (10 if RUNS_ALL else 3)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_rename_that_takes_effect_and_fails_all_the_same_has_saved(
    fault_server: FaultServer, fast_path: Path, scenario: Scenario
) -> None:
    """As NFS and FUSE answer, late."""
    field = Field(fault_server, fast_path, scenario, 1)
    log = fast_path / "log"
    assert field.save(log=str(log)).has_saved
    names = [call.name for call in read_log(log)]
    commit = max(number for number, name in enumerate(names, 1) if name in ("rename", "exchange"))
    outcome = field.save(at=commit, code=errno.EIO, is_late=True, log=str(log))
    assert outcome.has_saved and [call.name for call in read_log(log)] == names
    assert "fsync" in names[commit:] and field.check(outcome) == 2


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
    for at in writes:
        shutil.rmtree(fast_path / "run")
        (outcome,) = fault_server.run(Case(**(case.__dict__ | {"at": at, "code": errno.ENOSPC}))).ranks
        assert "cannot write at byte" in outcome and "__0_0.distcp" in outcome and "No space left" in outcome
        assert os.listdir(fast_path / "run") == []
