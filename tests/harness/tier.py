"""Which tier of the suite runs (``TTE_TIER``), and how much of what is many.

| tier | is called by | runs |
|---|---|---|
| commit | ``make test`` | one fixed list, the same on every machine and day |
| nightly | ``make nightly PART=...`` | a part: what needs the clock, servers, others' libraries, memory, a fresh seed |
| soak | ``make soak`` | ``TTE_SOAK`` times the cases |

    pytestmark = pytest.mark.nightly("lost")  # of a file, or of a test: not at commit, but in this part of the night
    @pytest.mark.sampled(0.3)                 # of the cases of a parametrized test; all in the parts that mark the test
    for seed in sampled(range(100), 0.3): ...
    for seed in range(num_cases(100)): ...

What is drawn at commit is drawn with seed 0. The part ``draw`` draws with ``TTE_SEED``, which ``make nightly`` chooses.
"""

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T")

PARTS = {
    "lost": "ranks that are killed, stopped or late: real processes, real deadlines",
    "kills": "kills at many points, races of processes, disks that lose what was not synced",
    "servers": "an S3 server, Ray, torchrun, torchtitan's trainer",
    "clients": "other people's libraries, beyond a smoke of each",
    "pages": "programs of the pages, README and examples",
    "memory": "memory of processes, and files too large for a commit",
    "draw": "random cases and a sample of long lists, by a fresh seed",
    "torch": "what depends on torch, with the newest one",
    "rehearsal": "the commit tier on one core beside four busy loops",
}
"""The parts of the nightly tier. The last two run other lists: see the Makefile."""

TIER, _, PART = os.environ.get("TTE_TIER", "commit").partition(":")
"""``commit``, ``soak``, or ``nightly`` with its part: ``TTE_TIER=nightly:lost``."""

if TIER not in ("commit", "nightly", "soak") or (TIER == "nightly") != (PART in PARTS):
    raise ValueError(f"TTE_TIER: got {os.environ['TTE_TIER']!r}, expected commit, soak or nightly:PART with {[*PARTS]}")

SOAK = int(os.environ.get("TTE_SOAK", "10")) if TIER == "soak" else 1
"""The factor of the soak; 1 in the other tiers."""

SEED = 0 if TIER == "commit" else int(os.environ.get("TTE_SEED", "0"))

RUNS_ALL = TIER == "soak" or PART not in ("", "draw")
"""Whether lists run whole: in the soak, and in the parts that mark their tests."""


def num_cases(every: int, share: float = 0.34) -> int:
    """How many of this number of random cases run: a share, or all of them, or a multiple in the soak."""
    return every * SOAK if RUNS_ALL else math.ceil(share * every)


def sampled(cases: Iterable[T], share: float, name: str = "") -> list[T]:
    """A share of the cases in their order, at least one, or none of a share of 0; all of them where lists run whole."""
    every = list(cases)
    if RUNS_ALL:
        return every
    drawn = random.Random(f"{SEED} {name}").sample(range(len(every)), math.ceil(share * len(every)))
    return [every[position] for position in sorted(drawn)]


def of_at_most_four(cases: Iterable[T], world_size: Callable[[T], int] = int) -> list[T]:
    """At commit the cases of worlds of at most four ranks: each rank of a larger one costs as much again."""
    return [case for case in cases if TIER != "commit" or world_size(case) <= 4]


def keep_tier(items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes out of ``items`` what this tier does not run, and returns it."""
    every = [item for item in items if _is_of_this_tier(item)]
    items_by_group: dict[tuple[str, float], list[pytest.Item]] = {}
    for item in every:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            share, group = (*mark.args, item.nodeid.partition("[")[0])[:2]
            items_by_group.setdefault((group, share), []).append(item)
    kept = set(every)
    for (group, share), members in items_by_group.items():
        kept -= set(members) - set(sampled(members, share, group))
    left = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left


def _is_of_this_tier(item: pytest.Item) -> bool:
    if TIER == "soak":
        return True
    part = part_of(item)
    return _draws(item) if PART == "draw" else part == PART


def part_of(item: pytest.Item) -> str:
    """The part of the nightly tier that runs a test; empty for one of the commit tier."""
    mark = item.get_closest_marker("nightly")
    if mark is None:
        return ""
    assert mark.args[0] in PARTS, f"{item.nodeid}: nightly({mark.args[0]!r}): expected one of {[*PARTS]}"
    return str(mark.args[0])


def part_of_file(path: Path) -> str:
    """The part of the nightly tier that runs all tests of a file, as its ``pytestmark`` says; else empty."""
    if path.suffix != ".py" or not path.is_file():
        return ""
    mark = re.search(r"^pytestmark = \[?pytest\.mark\.nightly\(\"(\w+)\"\)", path.read_text(), re.M)
    return "" if mark is None else mark[1]


def _draws(item: pytest.Item) -> bool:
    """Whether a test of the commit tier has random cases, or cases that are drawn."""
    if part_of(item):
        return False
    module: ModuleType | None = getattr(item, "module", None)
    return item.get_closest_marker("sampled") is not None or bool(_DRAWING & set(vars(module) if module else ()))


_DRAWING: set[str] = {"num_cases", "sampled", "SOAK", "given"}


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items file by file, those of the file that took longest first, by the committed times of some machine."""
    tables = [json.loads(path.read_text())["results"] for path in sorted(RESULTS.glob("suite_*.json"))]
    seconds = {name: row["seconds"] for table in tables for name, row in table.items()}
    return sorted(items, key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
