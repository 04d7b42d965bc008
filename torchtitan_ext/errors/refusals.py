"""Refusals: errors that are raised before anything is written or changed, with every problem of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.errors.failures import TorchtitanExtError
from torchtitan_ext.errors.problems import Problem, ProblemKind, listed


@dataclass(eq=False, repr=False)
class StateRefusedError(TorchtitanExtError, RuntimeError, ValueError):
    """A state dict is refused as a whole: nothing was written, and no target was changed.

    Attributes:
        operation: What was refused, for example ``"save"``.
        problems: Every problem found, over all ranks.
        report: What the load would have done with each component
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
        headings = HEADINGS_OF_OPERATIONS.get(self.operation, {})
        for kind, members in grouped.items():
            lines.append(f"{headings.get(kind, REFUSALS[kind][1])} ({len(members)}):")
            lines += listed(members)
        return "\n".join(lines)

    def _headline(self) -> str:
        return f"{self.operation} refused, nothing was changed"


class LayoutError(StateRefusedError):
    """A tensor's layout cannot be described exactly: Partial, in doubt, or at odds with the local tensors."""


class ReplicaMismatchError(StateRefusedError):
    """Ranks that should hold the same value, shape or dtype do not."""


class SyncMismatchError(StateRefusedError):
    """A sync or check of replicas: ranks disagree on the tensors, a tensor cannot be synced, or replicas differ.

    What to do: the message names keys and ranks.

    The same on every rank. Raised before any data moved, except where replicas are found to differ after a sync.
    """

    def _headline(self) -> str:
        if {problem.kind for problem in self.problems} == {"replicas_differ"}:
            return f"{self.operation}: replicas are not equal"
        return super()._headline()


class WrongArgumentError(StateRefusedError, TypeError):
    """An argument of a collective call has a type or value on some rank that it cannot have. The same on every rank.

    What to do: the message names it.

    Also raised for a planner whose class was written for DCP's default planner and follows another protocol than ours.
    """


class MissingStateError(StateRefusedError):
    """The checkpoint lacks keys that the state dict asks for."""


class ReshardError(StateRefusedError):
    """The checkpoint cannot become the state that the targets ask for."""


class TransformError(StateRefusedError):
    """A transform does not fit the tensors of the checkpoint, fills elements twice or not at all, or forgets some."""


REFUSALS: dict[ProblemKind, tuple[type[StateRefusedError], str]] = {
    "partial_placement": (LayoutError, "Partial tensors cannot be checkpointed"),
    "unknown_placement": (LayoutError, "Placements this package does not know"),
    "layout_in_doubt": (LayoutError, "Layouts in doubt"),
    "layout_matches_nothing": (LayoutError, "Local tensors that fit no reading of their placements"),
    "incomplete_cover": (LayoutError, "Tensors that the ranks do not hold exactly once"),
    "unsupported_tensor": (LayoutError, "Tensors that cannot be written"),
    "unsupported_value": (StateRefusedError, "Values that cannot be written"),
    "unused_layout": (LayoutError, "Entries of layouts= that match no key"),
    "ranks_disagree": (ReplicaMismatchError, "Ranks disagree"),
    "replicas_differ": (ReplicaMismatchError, "Replicas differ"),
    "missing_key": (MissingStateError, "Missing key in checkpoint"),
    "wrong_shape": (ReshardError, "Size mismatch"),
    "wrong_dtype": (ReshardError, "Dtype mismatch"),
    "wrong_type": (ReshardError, "Type mismatch"),
    "wrong_argument": (WrongArgumentError, "Arguments of a wrong type"),
    "refused_argument": (WrongArgumentError, "Arguments that some ranks refuse"),
    "planner_subclass": (WrongArgumentError, "Subclasses of planners that cannot be followed"),
    "unclaimed_keys": (ReshardError, "Per-rank entries that no rank asks for"),
    "broken_checkpoint": (ReshardError, "Checkpoint metadata is broken"),
    "no_checkpoint": (ReshardError, "Paths without a checkpoint that a load reads"),
    "cannot_sync": (SyncMismatchError, "Tensors that cannot be synced"),
    "cannot_reshard": (ReshardError, "Components that cannot cross to this world"),
    "unexpected_key": (ReshardError, "Saved entries that nothing asks for"),
    "policy_name": (ReshardError, "Names of the policy that cannot be followed"),
    "unused_filter": (ReshardError, "Filters that select nothing"),
    "wrong_transform": (TransformError, "Transforms that do not fit the source"),
}
"""For each kind of problem the error and the heading of its problems in reports."""

HEADINGS_OF_OPERATIONS: dict[str, dict[ProblemKind, str]] = {
    "dry_run": {"unused_layout": "Entries of placements= that fit no key"},
    "load": {
        "partial_placement": "Partial tensors cannot be filled",
        "unsupported_tensor": "Tensors that cannot be filled",
        "unsupported_value": "Values that cannot be filled",
    },
    "reshard": {
        "partial_placement": "Partial tensors cannot be sent or filled",
        "unsupported_tensor": "Tensors that cannot be sent or filled",
        "unsupported_value": "Values that cannot be sent or filled",
        "missing_key": "Keys that the source does not have",
        "cannot_reshard": "Sides of the transfer that have changed",
    },
}
"""The headings of some operations, where they differ."""


def refusal(operation: str, problems: Iterable[Problem], report: Any = None) -> StateRefusedError:
    """The error for these problems, of the class that they share; ``StateRefusedError`` if they share none."""
    unique = tuple(dict.fromkeys(problems))
    classes = {REFUSALS[problem.kind][0] for problem in unique}
    error_class = classes.pop() if len(classes) == 1 else StateRefusedError
    return error_class(operation, unique, report)
