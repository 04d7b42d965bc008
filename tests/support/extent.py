"""How much of the suite runs: a sample by default, all with TTE_TESTS=full, large numbers with TTE_SOAK=factor.

``make test``, ``make test-full`` and ``make soak``. What a sample has depends on TTE_SEED, which pytest prints first:

    @pytest.mark.sampled(0.3)                # of the cases of a parametrized test
    @pytest.mark.sampled(0.3, "launches")    # of all tests of this group
    @pytest.mark.sampled(0)                  # in the full suite alone
    for seed in sampled(range(100), 0.3): ...
    for seed in range(num_cases(100)): ...
"""

import math
import os
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

SEED = int(os.environ.get("TTE_SEED", "0"))

SOAK = int(os.environ.get("TTE_SOAK", "1"))
"""The factor of the soak; 1 in the suite."""

IS_FULL = SOAK > 1 or os.environ.get("TTE_TESTS") == "full"


def num_cases(every: int, share: float = 0.34) -> int:
    """How many of this number of random cases run: a share, all in the full suite, a multiple in the soak."""
    return every * SOAK if IS_FULL else math.ceil(share * every)


def sampled(cases: Iterable[T], share: float, name: str = "") -> list[T]:
    """A share of the cases in their order, at least one, or none of a share of 0; all of them in the full suite."""
    every = list(cases)
    if IS_FULL:
        return every
    drawn = random.Random(f"{SEED} {name}").sample(range(len(every)), math.ceil(share * len(every)))
    return [every[position] for position in sorted(drawn)]


def keep_sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes the cases that are not drawn out of ``items``, and returns them."""
    if IS_FULL:
        return []
    cases: dict[tuple[str, float], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            share, group = (*mark.args, item.nodeid.partition("[")[0])[:2]
            cases.setdefault((group, share), []).append(item)
    left = {item for (group, share), members in cases.items() for item in _not_drawn(members, share, group)}
    items[:] = [item for item in items if item not in left]
    return list(left)


def _not_drawn(members: Sequence[pytest.Item], share: float, group: str) -> set[pytest.Item]:
    return set(members) - set(sampled(members, share, group))
