"""A run in which saves meet faults, made anew for each of them, and what must hold afterwards."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from file_faults import Case, FaultServer, Outcome, loaded_value


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
        no_exchange = self.scenario.no_exchange
        return Case(str(root), str(target), world_size=self.world_size, no_exchange=no_exchange, **options)

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
