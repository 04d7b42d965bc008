"""What planners keep between saves of an unchanged structure: on each rank its plan, on the coordinator all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner

from torchtitan_ext.checkpoint.tables.agreement import Agreement
from torchtitan_ext.checkpoint.tables.key_table import RankTable

# A job alternates between few state dicts (full, model only); more would be a leak. The dicts are those of the stock
# planner, so our keys carry a prefix.
_MAX_CACHED_STRUCTURES = 4
CACHE_PREFIX = "torchtitan_ext:"


@dataclass(frozen=True)
class CachedTable:
    """What a rank sends instead of a table that the coordinator knows: its name there, and the values' digests.

    Attributes:
        structure: The digest of the table.
        token: The plan of which the table was a part.
        rank: The rank's position in that plan.
        digests: Those of a table.
    """

    structure: str
    token: str
    rank: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class KnownPlan:
    """What the coordinator keeps of a plan.

    Attributes:
        tables: Of all ranks, without digests of values.
        agreement: What they say together.
        equal: Numbers of the keys that any rank of several meshes writes, because it held the same on all of them.
        needs_all_ranks: How that was looked at.
    """

    tables: list[RankTable]
    agreement: Agreement
    equal: list[int]
    needs_all_ranks: bool


def known_plan(token: str | None) -> KnownPlan | None:
    """What this coordinator keeps of a plan; ``None`` where it did not make it, or has dropped it."""
    return None if token is None else StockSavePlanner._cached_all_plans.get(token)  # type: ignore[return-value]


def remember(cache: dict[str, Any], key: str, value: Any) -> None:
    """Adds an entry as the newest, and drops the oldest of too many."""
    cache.pop(key, None)
    cache[key] = value
    forget(cache, keep=_MAX_CACHED_STRUCTURES)


def forget(cache: dict[str, Any], *, keep: int = 0) -> None:
    """Drops our entries, all but the newest few."""
    ours = own_keys(cache)
    for known in ours[: len(ours) - keep]:
        del cache[known]


def forget_replaced(plan: KnownPlan) -> None:
    """Drops what the coordinator keeps of earlier plans of the same tables: all ranks are about to get a new one."""
    structures = [table.structure for table in plan.tables]
    for token in own_keys(StockSavePlanner._cached_all_plans):
        known = known_plan(token)
        if known is not None and [table.structure for table in known.tables] == structures:
            del StockSavePlanner._cached_all_plans[token]
            StockSavePlanner._cached_metadata.pop(token, None)


def forget_unknown(plans: dict[str, Any], known_tokens: Collection[str]) -> None:
    """Drops the plans that the coordinator has dropped: a save that refers to one would be refused."""
    for key in own_keys(plans):
        if plans[key].planner_data.token not in known_tokens:
            del plans[key]


def own_keys(cache: Iterable[str]) -> list[str]:
    """Our entries of a cache that stock planners share, oldest first."""
    return [key for key in cache if key.startswith(CACHE_PREFIX)]
