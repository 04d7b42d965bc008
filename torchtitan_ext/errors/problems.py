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
    "planner_subclass",
    "unclaimed_keys",
    "broken_checkpoint",
    "no_checkpoint",
    "cannot_sync",
    "cannot_reshard",
    "unexpected_key",
    "policy_name",
    "unused_filter",
]

HEADINGS: dict[ProblemKind, str] = {
    "partial_placement": "Partial tensors cannot be checkpointed",
    "unknown_placement": "Placements this package does not know",
    "layout_in_doubt": "Layouts in doubt",
    "layout_matches_nothing": "Local tensors that fit no reading of their placements",
    "incomplete_cover": "Tensors that the ranks do not hold exactly once",
    "unsupported_tensor": "Tensors that cannot be written",
    "unsupported_value": "Values that cannot be written",
    "unused_layout": "Entries of layouts= that match no key",
    "ranks_disagree": "Ranks disagree",
    "replicas_differ": "Replicas differ",
    "missing_key": "Missing key in checkpoint",
    "wrong_shape": "Size mismatch",
    "wrong_dtype": "Dtype mismatch",
    "wrong_type": "Type mismatch",
    "wrong_argument": "Arguments of a wrong type",
    "planner_subclass": "Subclasses of planners that cannot be followed",
    "unclaimed_keys": "Per-rank entries that no rank asks for",
    "broken_checkpoint": "Checkpoint metadata is broken",
    "no_checkpoint": "Paths without a checkpoint that a load reads",
    "cannot_sync": "Tensors that cannot be synced",
    "cannot_reshard": "Components that cannot cross to this world",
    "unexpected_key": "Saved entries that nothing asks for",
    "policy_name": "Names of the policy that cannot be followed",
    "unused_filter": "Filters that select nothing",
}
"""What each kind is called in a report."""

LOAD_HEADINGS: dict[ProblemKind, str] = {
    "partial_placement": "Partial tensors cannot be filled",
    "unsupported_tensor": "Tensors that cannot be filled",
    "unsupported_value": "Values that cannot be filled",
}
"""The same of a load, where that differs."""

MAX_NAMED = 10
"""A report stays readable for a model of ten thousand tensors."""


@dataclass(frozen=True)
class Remedy:
    """An option that would make a refused operation go, for callers whose users give it in another way.

    Attributes:
        option: ``"cast"``; ``"num_shards"`` of a data loader; ``"reshard"`` for per-rank entries, whose value is the
            number of them; ``"placements"``, whose value is a rule as ``parse_rules`` takes it; ``"weights_only"``.
        value: What to give it.
    """

    option: Literal["cast", "num_shards", "reshard", "placements", "weights_only"]
    value: str | int | bool


@dataclass(frozen=True)
class Problem:
    """One reason why a state is refused: what kind, which key, and a sentence with both values and what to do.

    Attributes:
        advice: The end of the sentence, where it says what to do in calls of this package.
        remedy: The same as a value.
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
    """For sentences: the first of some names, and how many there are more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def listed(problems: Sequence[Problem]) -> list[str]:
    """For reports: a line for each of the first ten problems, and how many there are more."""
    lines = [f"  {problem}" for problem in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"  ... and {len(problems) - MAX_NAMED} more")
    return lines
