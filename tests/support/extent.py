"""How much of the suite runs: a sample by default, all with TTE_TESTS=full, large numbers with TTE_SOAK=factor.

``make test``, ``make test-full`` and ``make soak``. What a sample has depends on TTE_SEED, which pytest prints first:

    @pytest.mark.sampled(0.3)           # a third of the cases of a parametrized test, or of a test's loops:
    for seed in sampled(range(100), 0.3): ...
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


def sampled(cases: Iterable[T], share: float, name: str = "") -> list[T]:
    """A share of the cases in their order, at least one; all of them in the full suite."""
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
            test = item.nodeid.partition("[")[0]
            cases.setdefault((test, mark.args[0]), []).append(item)
    left = {item for (test, share), members in cases.items() for item in _not_drawn(members, share, test)}
    items[:] = [item for item in items if item not in left]
    return [item for item in left]


def _not_drawn(members: Sequence[pytest.Item], share: float, test: str) -> set[pytest.Item]:
    return set(members) - set(sampled(members, share, test))
