"""Why a state is refused, as values: the kinds of problems, and how reports show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    "cannot_sync",
    "cannot_reshard",
    "unexpected_key",
    "policy_name",
    "unused_filter",
    "wrong_transform",
]

MAX_NAMED = 10
"""A report stays readable for a model of ten thousand tensors."""

_MANY = 4
"""So many keys of one sentence share a line."""


@dataclass(frozen=True)
class Remedy:
    """An option that would let a refused operation pass, for callers whose users give it in another way.

    Attributes:
        option: ``"cast"``; ``"num_shards"`` of a data loader; ``"reshard"`` for per-rank entries, whose value is the
            number of them; ``"placements"``, whose value is a rule as ``parse_rules`` takes it; ``"weights_only"``.
        value: The value to give to the option.
    """

    option: Literal["cast", "num_shards", "reshard", "placements", "weights_only"]
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
        return self.said_of(self.fqn)

    def said_of(self, keys: str) -> str:
        """The sentence with other words in the place of the key."""
        # Sentences of stock DCP name the key at their end. A key such as "w" is in many sentences that do not name it.
        text = self.detail + self.advice
        for mark in ".;":
            if f" {self.fqn}{mark}" in text:
                return text.replace(f" {self.fqn}{mark}", f" {keys}{mark}", 1)
        return f"{keys}: {text}"


def named(names: Sequence[object], most: int = MAX_NAMED) -> str:
    """For sentences: the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def named_ranks(ranks: Sequence[int]) -> str:
    """For sentences: ``rank 3``, ``ranks 0, 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {named(ranks, 8)}"


def differing(
    name: str,
    values: Sequence[object],
    *,
    ranks: Sequence[int] | None = None,
    verb: str = "is",
    show: Callable[[Any], str] | None = repr,
    advice: str = "",
) -> list[Problem]:
    """The problem that ranks do not all give the same: "is 'equal' on rank 0, 'first' on ranks 1, 2"; else none.

    Args:
        ranks: Whose values these are; from 0 on if left out.
        show: What a reader sees of a value; ``None`` for values that say nothing to him.
        advice: What to do.
    """
    of_value: list[tuple[object, list[int]]] = []
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        members = next((members for other, members in of_value if other == value), None)
        if members is None:
            of_value.append((value, members := []))
        members.append(rank)
    if len(of_value) < 2:
        return []
    if show is None:
        what = f"not the same on {' and on '.join(named_ranks(members) for _, members in of_value[:2])}"
    else:
        what = ", ".join(f"{show(value)} on {named_ranks(members)}" for value, members in of_value[:MAX_NAMED])
    return [Problem("ranks_disagree", name, f"{verb} {what}", advice and f"; {advice}")]


def listed(problems: Sequence[Problem]) -> list[str]:
    """For reports: at most ten lines, and how many more problems there are. Many keys of one sentence are one line."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.said_of(""), []).append(problem)
    groups = [
        part for group in alike.values() for part in ([group] if len(group) >= _MANY else [[one] for one in group])
    ]
    lines = [f"  {_line_of(group)}" for group in groups[:MAX_NAMED]]
    num_more = sum(map(len, groups[MAX_NAMED:]))
    return [*lines, f"  ... and {num_more} more"] if num_more else lines


def _line_of(alike: Sequence[Problem]) -> str:
    first, *others = alike
    if not others:
        return str(first)
    names = ", ".join(problem.fqn for problem in others[: _MANY - 2])
    dots = ", ..." if len(others) > _MANY - 2 else ""
    return first.said_of(f"{first.fqn} (and {len(others)} more: {names}{dots})")
