"""Why a state is refused, as values: the kinds of problems, and how reports show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ProblemKind = Literal[
    "partial_placement",
    "unknown_placement",
    "layout_in_doubt",
    "layout_matches_nothing",
    "incomplete_cover",
    "unsupported_tensor",
    "unsupported_value",
    "unused_layout",
    "ranks_disagree",
    "replicas_differ",
    "missing_key",
    "wrong_shape",
    "wrong_dtype",
    "wrong_type",
    "wrong_argument",
    "refused_argument",
    "planner_subclass",
    "unclaimed_keys",
    "broken_checkpoint",
    "no_checkpoint",
    "newer_steps",
    "cannot_sync",
    "cannot_reshard",
    "unexpected_key",
    "policy_name",
    "unused_filter",
    "wrong_transform",
    "other_base",
]

MAX_NAMED = 10
"""A report stays readable for a model of ten thousand tensors."""


@dataclass(frozen=True)
class Remedy:
    """An option that would let a refused operation pass, for callers whose users give it in another way.

    Attributes:
        option: ``"cast"``; ``"num_shards"`` of a data loader; ``"reshard"`` for per-rank entries, whose value is the
            number of them; ``"placements"``, whose value is a rule as ``parse_rules`` takes it; ``"weights_only"``;
            ``"optimizer_state"``, whose value is the key of an optimizer that needs its state before a load.
        value: The value to give to the option.
    """

    option: Literal["cast", "num_shards", "reshard", "placements", "weights_only", "optimizer_state"]
    value: str | int | bool


@dataclass(frozen=True)
class Problem:
    """One reason why a state is refused: what kind, which key, and a sentence with both values and what to do.

    Attributes:
        advice: The end of the sentence: what to do, in calls of this package.
        remedy: The advice as a value.
    """

    kind: ProblemKind
    fqn: str
    detail: str
    advice: str = ""
    remedy: Remedy | None = None

    def __str__(self) -> str:
        # Sentences of stock DCP name the key at their end. A key such as "w" is in many sentences that do not name it.
        text = self.detail + self.advice
        is_named = any(f" {self.fqn}{mark}" in text for mark in ".;")
        return text if is_named else f"{self.fqn}: {text}"


def named(names: Sequence[object], most: int = MAX_NAMED) -> str:
    """For sentences: the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def listed(problems: Sequence[Problem]) -> list[str]:
    """For reports: a line for each of the first ten problems, and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"  ... and {len(problems) - MAX_NAMED} more")
    return lines
