"""Refusals: errors that are raised before anything is written or changed, with every problem of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.errors.failures import TorchtitanExtError
from torchtitan_ext.errors.problems import HEADINGS, LOAD_HEADINGS, Problem, ProblemKind, listed


@dataclass(eq=False, repr=False)
class StateRefusedError(TorchtitanExtError, RuntimeError, ValueError):
    """A state dict is refused as a whole: nothing was written, and no target was changed.

    Attributes:
        operation: What was refused, for example ``"save"``.
        problems: Every problem found, over all ranks.
        report: With a policy, what the load would have done with each component, and what to pass so that it can
            (``torchtitan_ext.checkpoint.rules.report.LoadReport``).
    """

    operation: str
    problems: tuple[Problem, ...]
    report: Any = None

    def __str__(self) -> str:
        grouped: dict[ProblemKind, list[Problem]] = {}
        for problem in self.problems:
            grouped.setdefault(problem.kind, []).append(problem)
        lines = [f"{self._headline()}; {len(self.problems)} problem(s):"]
        lines += [] if self.report is None else [str(self.report)]
        headings = {**HEADINGS, **LOAD_HEADINGS} if self.operation == "load" else HEADINGS
        for kind, members in grouped.items():
            lines.append(f"{headings[kind]} ({len(members)}):")
            lines += listed(members)
        if self.report is not None and self.report.way_on:
            lines.append(self.report.way_on)
        return "\n".join(lines)

    def _headline(self) -> str:
        return f"{self.operation} refused, nothing was changed"


class LayoutError(StateRefusedError):
    """A tensor's layout cannot be described exactly: Partial, in doubt, or at odds with the local tensors."""


class ReplicaMismatchError(StateRefusedError):
    """Ranks that should hold the same value, shape or dtype do not."""


class SyncMismatchError(StateRefusedError):
    """A sync or check of replicas: ranks disagree on the tensors, a tensor cannot be synced, or replicas differ.

    The same on every rank. Raised before any data moved, except where replicas are found to differ after a sync.
    """

    def _headline(self) -> str:
        if {problem.kind for problem in self.problems} == {"replicas_differ"}:
            return f"{self.operation}: replicas are not equal"
        return super()._headline()


class WrongArgumentError(StateRefusedError, TypeError):
    """An argument of a collective call has the wrong type on some rank. The same on every rank.

    Also raised for a planner whose class was written for DCP's default planner and follows another protocol than ours.
    """


class MissingStateError(StateRefusedError):
    """The checkpoint lacks keys that the state dict asks for."""


class ReshardError(StateRefusedError):
    """The checkpoint cannot become the state that the targets ask for."""


ERROR_OF_KIND: dict[ProblemKind, type[StateRefusedError]] = {
    "partial_placement": LayoutError,
    "unknown_placement": LayoutError,
    "layout_in_doubt": LayoutError,
    "layout_matches_nothing": LayoutError,
    "incomplete_cover": LayoutError,
    "unsupported_tensor": LayoutError,
    "unsupported_value": StateRefusedError,
    "unused_layout": LayoutError,
    "ranks_disagree": ReplicaMismatchError,
    "replicas_differ": ReplicaMismatchError,
    "missing_key": MissingStateError,
    "wrong_shape": ReshardError,
    "wrong_dtype": ReshardError,
    "wrong_type": ReshardError,
    "wrong_argument": WrongArgumentError,
    "planner_subclass": WrongArgumentError,
    "unclaimed_keys": ReshardError,
    "broken_checkpoint": ReshardError,
    "no_checkpoint": ReshardError,
    "cannot_sync": SyncMismatchError,
    "cannot_reshard": ReshardError,
    "unexpected_key": ReshardError,
    "policy_name": ReshardError,
    "unused_filter": ReshardError,
}


def refusal(operation: str, problems: Iterable[Problem], report: Any = None) -> StateRefusedError:
    """The error for these problems, of the class that they share; ``StateRefusedError`` if they share none."""
    unique = tuple(dict.fromkeys(problems))
    classes = {ERROR_OF_KIND[problem.kind] for problem in unique}
    error_class = classes.pop() if len(classes) == 1 else StateRefusedError
    return error_class(operation, unique, report)
