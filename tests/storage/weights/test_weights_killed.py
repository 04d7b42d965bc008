"""``kill -9``, or an error, at every operation on files of a save of safetensors: the old weights or the new, whole."""

import errno
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from file_faults import Case, FaultServer, Outcome, tensors_of
from safetensors.torch import load_file
from tier import SEED, SOAK

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Scenario:
    """Old weights in files of so many bytes, or none, beside files of others or alone; then new ones."""

    name: str
    old_file_bytes: int
    new_file_bytes: int
    has_foreign: bool = False
    no_exchange: bool = False
    one_writer: bool = False


ONE, SEVERAL = 10**9, 3000
SCENARIOS = [
    Scenario("fresh", 0, SEVERAL),
    Scenario("fresh, beside others", 0, SEVERAL, has_foreign=True),
    Scenario("several to several", SEVERAL, SEVERAL),
    Scenario("one to several, beside others", ONE, SEVERAL, has_foreign=True),
    Scenario("several to one, beside others", SEVERAL, ONE, has_foreign=True),
    Scenario("several to several, no exchange", SEVERAL, SEVERAL, no_exchange=True),
]


WITH_ONE_WRITER = Scenario("several to several, one writer", SEVERAL, SEVERAL, one_writer=True)


def value_at(path: Path, world_size: int) -> int | str:
    """What a reader finds that follows the index: the value of all tensors; "none", or "mix"."""
    try:
        if (path / INDEX).exists():
            names = json.loads((path / INDEX).read_text())["weight_map"]
            parts = {name: load_file(path / name) for name in set(names.values())}
            found = {fqn: parts[name][fqn] for fqn, name in names.items()}
        else:
            found = load_file(path / "model.safetensors")
    except FileNotFoundError:
        return "none"
    value = int(found["w"][0, 0])
    truth = tensors_of(value, world_size)
    is_whole = found.keys() == truth.keys() and all(torch.equal(found[fqn], truth[fqn]) for fqn in truth)
    return value if is_whole else "mix"


class Field:
    """A directory with old weights, made anew for each case, and what must hold after it."""

    def __init__(self, server: FaultServer, folder: Path, scenario: Scenario, world_size: int) -> None:
        self.server, self.scenario, self.world_size = server, scenario, world_size
        self.root, self.template = folder / "root", folder / "template"
        self.target = self.root / "hf"
        self.template.mkdir()
        if scenario.old_file_bytes:
            old = self.case(self.template, value=1, max_file_bytes=scenario.old_file_bytes)
            assert server.run(old).has_saved
        if scenario.has_foreign:
            (self.template / "hf").mkdir(exist_ok=True)
            (self.template / "hf" / "config.json").write_text("{}")
        self.before = value_at(self.template / "hf", world_size)

    def case(self, root: Path, *, max_file_bytes: int = 0, **options: object) -> Case:
        return Case(
            str(root),
            str(root / "hf"),
            world_size=self.world_size,
            no_exchange=self.scenario.no_exchange,
            one_writer=self.scenario.one_writer,
            max_file_bytes=max_file_bytes or self.scenario.new_file_bytes,
            **options,
        )

    def save(self, **options: object) -> Outcome:
        if self.root.exists():
            shutil.rmtree(self.root)
        shutil.copytree(self.template, self.root)
        return self.server.run(self.case(self.root, **options))

    def check(self, outcome: Outcome) -> int | str:
        found = value_at(self.target, self.world_size)
        assert found in (self.before, 2) and (found == 2 or not outcome.has_saved), (found, outcome)
        assert self.server.run(self.case(self.root, value=3)).has_saved
        assert value_at(self.target, self.world_size) == 3
        assert os.listdir(self.root) == ["hf"]
        num_files = 1 if self.scenario.new_file_bytes == ONE else len(os.listdir(self.target)) - 1
        num_files -= self.scenario.has_foreign and num_files > 1
        names = sorted(set(os.listdir(self.target)) - {"config.json"})
        if num_files == 1:
            assert names == ["model.safetensors"]
        else:
            assert names == [*(f"model-{n:05}-of-{num_files:05}.safetensors" for n in range(1, num_files + 1)), INDEX]
        assert (self.target / "config.json").exists() == self.scenario.has_foreign
        return found


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [(SCENARIOS[0], 1), (SCENARIOS[2], 1), (SCENARIOS[3], 1), (WITH_ONE_WRITER, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kills_and_an_error(fault_server: FaultServer, fast_path: Path, scenario: Scenario, world_size: int) -> None:
    """In the middle of each rank, and at the last operation; and an error instead."""
    field = Field(fault_server, fast_path, scenario, world_size)
    num_calls = field.save().num_calls
    for rank in range(world_size):
        outcome = field.save(rank=rank, at=num_calls[rank] // 2)
        assert outcome.ranks[rank] == "killed" and field.check(outcome) == field.before
    if world_size == 1:
        assert field.check(field.save(at=num_calls[0])) == 2
        outcome = field.save(at=num_calls[0] // 2, code=errno.ENOSPC)
        assert os.strerror(errno.ENOSPC) in outcome.ranks[0] and field.check(outcome) == field.before


@pytest.mark.nightly("kills")
@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [*((scenario, size) for scenario in SCENARIOS for size in (1, 2)), (WITH_ONE_WRITER, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kill_at_every_operation(
    fault_server: FaultServer, fast_path: Path, scenario: Scenario, world_size: int
) -> None:
    field = Field(fault_server, fast_path, scenario, world_size)
    whole = field.save()
    assert whole.has_saved and field.check(whole) == 2
    found = []
    for rank in range(world_size):
        every = range(1, whole.num_calls[rank] + 1)
        assert len(every) >= (10 if rank == 0 else 2)
        points = list(every)
        if SOAK == 1 and world_size > 1:
            points = sorted(random.Random(SEED + rank).sample(every, 2))
        for at in points:
            outcome = field.save(rank=rank, at=at)
            assert outcome.ranks[rank] == "killed"
            found.append(field.check(outcome))
    print(f"{scenario.name}, {world_size} rank(s): {len(found)} kills, {found.count(2)} after the commit")
    assert found.count(field.before) > 0 and (found.count(2) > 0 or world_size > 1)


@pytest.mark.nightly("kills")
@pytest.mark.parametrize("scenario", SCENARIOS[::2], ids=lambda scenario: scenario.name)
def test_an_error_at_every_operation(fault_server: FaultServer, fast_path: Path, scenario: Scenario) -> None:
    field = Field(fault_server, fast_path, scenario, 1)
    num_calls = field.save().num_calls[0]
    for at in range(1, num_calls + 1):
        outcome = field.save(at=at, code=errno.ENOSPC)
        if not outcome.has_saved:
            assert os.strerror(errno.ENOSPC) in outcome.ranks[0], outcome
        field.check(outcome)
