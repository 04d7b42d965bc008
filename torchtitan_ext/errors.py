"""The errors of the package: ordinary exceptions that survive pickling with their fields.

A refusal lists every problem at once, grouped by kind, and is the same on every rank. Through ``tte.save`` and
``tte.load`` it reaches the caller as it is; stock ``dcp.save`` and ``dcp.load`` wrap it in ``CheckpointException``
(a BaseException), whose text then ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
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
    "planner_subclass",
    "unclaimed_keys",
    "broken_checkpoint",
    "cannot_sync",
    "cannot_reshard",
    "unexpected_key",
    "policy_name",
]

# A report stays readable for a model of ten thousand tensors.
_MAX_LINES_PER_KIND = 10

# A wrong argument is shown where it is short; a long text says no more than its type.
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Remedy:
    """An option that would make a refused operation go, for callers whose users give it in another way.

    Attributes:
        option: ``"cast"``; ``"num_shards"`` of a data loader; ``"reshard"`` for per-rank entries, whose value is the
            number of them.
        value: What to give it.
    """

    option: Literal["cast", "num_shards", "reshard"]
    value: str | int


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


class TorchtitanExtError(Exception):
    """Base of all errors of the package."""


class StateRefusedError(TorchtitanExtError, RuntimeError, ValueError):
    """A state dict is refused as a whole: nothing was written, and no target was changed.

    Args:
        operation: What was refused, for example ``"save"``.
        problems: Every problem found, over all ranks.
        report: What the operation would have done with each component, and what to pass to make it go, where a policy
            asked for it (``torchtitan_ext.checkpoint.report.LoadReport``).
    """

    def __init__(self, operation: str, problems: tuple[Problem, ...], report: Any = None) -> None:
        super().__init__(operation, problems, report)
        self.operation = operation
        self.problems = problems
        self.report = report

    def __str__(self) -> str:
        grouped: dict[ProblemKind, list[Problem]] = {}
        for problem in self.problems:
            grouped.setdefault(problem.kind, []).append(problem)
        lines = [f"{self._headline()}; {len(self.problems)} problem(s):"]
        lines += [] if self.report is None else [str(self.report)]
        for kind, members in grouped.items():
            lines.append(f"{_HEADINGS[kind]} ({len(members)}):")
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
    """Ranks that sync, or check, replicas disagree on what these are, or a tensor cannot be synced, or replicas differ.

    The same on every rank. Raised before any data moved, except where replicas are found to differ after a sync.
    """

    def _headline(self) -> str:
        if {problem.kind for problem in self.problems} == {"replicas_differ"}:
            return f"{self.operation}: replicas are not equal"
        return super()._headline()


class WrongArgumentError(StateRefusedError, TypeError):
    """An argument of a collective call is of another type than expected, on some rank. The same on every rank.

    A planner, too, whose class was written for DCP's default planner and keeps another protocol than ours.
    """


class LostRankError(TorchtitanExtError, RuntimeError):
    """A collective of a sync, check, save or load failed: a rank died, hangs, or raised something else first.

    In a sync or check raised on the ranks that notice: at once next to a lost connection, on others when these
    neighbours give up, at the latest after the timeout of the process group. In a save or load the same on every rank,
    a few seconds after ``timeout_seconds`` at the latest; on a rank that was stopped or slept, when it goes on.

    Args:
        operation: What failed, for example ``"sync_module_states"``.
        phase: What the ranks did meanwhile.
        rank: The rank that raises; ``None`` where all raise the same.
        silent: Ranks that did not answer a roll call of a few seconds: gone, or waiting for one that is.
        reason: What the backend said, or who waited how long.
        step: Of a save or load the phase by its name.
        path: Of a save or load the checkpoint.
        late: Ranks that answered that they were still at work, and where.
    """

    def __init__(
        self,
        operation: str,
        phase: str,
        rank: int | None,
        silent: tuple[int, ...],
        reason: str,
        step: str = "",
        path: str = "",
        late: Mapping[int, str] | None = None,
    ) -> None:
        late = dict(late or {})
        super().__init__(operation, phase, rank, silent, reason, step, path, late)
        self.operation = operation
        self.phase = phase
        self.rank = rank
        self.silent = silent
        self.reason = reason
        self.step = step
        self.path = path
        self.late = late

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        where += f" in phase {self.step}" if self.step else ""
        where += f" of {self.path}" if self.path else ""
        silent = f"rank(s) {', '.join(map(str, self.silent))} did not answer" if self.silent else "all ranks answered"
        late = "".join(f"; rank {rank} is still at work ({text})" for rank, text in self.late.items())
        return f"{self.operation} failed{where} while {self.phase}; {silent} a roll call{late}; {self.reason}"


class MissingStateError(StateRefusedError):
    """The checkpoint lacks keys that the state dict asks for."""


class ReshardError(StateRefusedError):
    """The checkpoint cannot become the state that the targets ask for."""


class CannotReshardError(TorchtitanExtError, RuntimeError):
    """A component cannot become what this world needs; raised by its ``reshard``, shown in the report of the load.

    Args:
        reason: Why, with the saved and the wanted values.
        remedy: What the user can do.
        option: The same as a value, where it is one option.
    """

    def __init__(self, reason: str, remedy: str, option: Remedy | None = None) -> None:
        super().__init__(reason, remedy, option)
        self.reason = reason
        self.remedy = remedy
        self.option = option

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class CheckpointReadError(TorchtitanExtError, RuntimeError):
    """A value of the checkpoint could not be read back after loading had begun; targets may be part-written."""

    def __init__(self, fqn: str, reason: str) -> None:
        super().__init__(fqn, reason)
        self.fqn = fqn
        self.reason = reason

    def __str__(self) -> str:
        return f"load: cannot read {self.fqn}: {self.reason}"


class DamagedValueError(CheckpointReadError):
    """The bytes of a value of the checkpoint are not those of a value."""

    def __str__(self) -> str:
        return f"{super().__str__()}; load another step"


class DamagedCheckpointError(TorchtitanExtError, RuntimeError):
    """Bytes of a checkpoint's files are not what was written, or not what this package can read.

    Args:
        reason: The file, the byte, and which tensors' rows lie there.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"load: {self.reason}; load another step"


class SaveInProgressError(TorchtitanExtError, RuntimeError):
    """Another save is under way in the same place, or took it over; this one wrote nothing that anybody reads.

    Args:
        path: Where.
        owner: Who saves there: process, host, since when.
        lock: The file that says so.
    """

    def __init__(self, path: str, owner: str, lock: str) -> None:
        super().__init__(path, owner, lock)
        self.path = path
        self.owner = owner
        self.lock = lock

    def __str__(self) -> str:
        return (
            f"save: {self.path} is being saved to by {self.owner}; wait for it, end it, or save to another directory. "
            f"If it is gone, remove {self.lock}"
        )


class SavedOverError(TorchtitanExtError, RuntimeError):
    """A checkpoint was saved over, or removed, while it was loaded. The same on every rank; nothing was mixed.

    Args:
        path: The checkpoint.
        detail: What of the earlier one is gone.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return f"load: {self.path} was saved over while it was read ({self.detail}); load it again"


class NoCheckpointError(TorchtitanExtError, RuntimeError):
    """A run has no checkpoint of the step that was asked for, or none that is good.

    Args:
        run: The directory of the run.
        detail: What was asked for and what is there.
    """

    def __init__(self, run: str, detail: str) -> None:
        super().__init__(run, detail)
        self.run = run
        self.detail = detail

    def __str__(self) -> str:
        return f"load: {self.run} {self.detail}"


class UnknownFormatError(TorchtitanExtError, RuntimeError):
    """What lies at a path is no checkpoint of a format that this package knows, or one whose save has not finished.

    Args:
        path: Of the file or directory.
        detail: What is there, or is not.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.path} is no checkpoint: {self.detail}; expected a directory of torch.distributed.checkpoint, "
            "safetensors files, or a file of torch.save"
        )


class UnsafePickleError(TorchtitanExtError, RuntimeError):
    """A file's pickle names what is not on the list of what may be unpickled; nothing of it was run.

    Args:
        path: Of the file.
        detail: What it names.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.path} is not unpickled, which could run any code: {self.detail}"


class CheckpointFailedError(TorchtitanExtError, RuntimeError):
    """Ranks failed while planning, writing or reading, for reasons outside this package (a full disk, a lost file).

    Args:
        operation: What failed, for example ``"save"``.
        failures: What each failed rank raised, as text.
        undefined: Components of the state dict that may be part-written: load them again, or start anew.
        step: The phase by its name.
        path: Of the checkpoint.
    """

    def __init__(
        self, operation: str, failures: dict[int, str], undefined: tuple[str, ...] = (), step: str = "", path: str = ""
    ) -> None:
        super().__init__(operation, failures, undefined, step, path)
        self.operation = operation
        self.failures = failures
        self.undefined = undefined
        self.step = step
        self.path = path

    def __str__(self) -> str:
        ranks = "; ".join(f"rank {rank}: {failure}" for rank, failure in self.failures.items())
        text = f"{self.operation} failed on {len(self.failures)} rank(s): {ranks}"
        if self.step:
            text += f" (in phase {self.step}{f' of {self.path}' if self.path else ''})"
        if self.undefined:
            text += f". Part-written, load again or start anew: {', '.join(self.undefined)}; all else is unchanged"
        return text


class WorkerLostError(TorchtitanExtError, RuntimeError):
    """A process that did a part of the work was killed, most often for lack of memory. Nothing was committed.

    Args:
        exit_code: As ``multiprocessing`` has it: minus the number of the signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        how = f"was killed by signal {-self.exit_code}" if self.exit_code < 0 else f"ended with {self.exit_code}"
        return f"a worker process {how}; nothing was changed; try fewer processes or less memory"


class CannotInstallError(TorchtitanExtError, RuntimeError):
    """``tte.install`` does not know this torch, or somebody else has patched the functions that it wraps."""


def described(value: object) -> str:
    """What a value is, for messages: "a Linear", "the class Linear"; short plain values as they are written."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, bool, type(None))) and len(repr(value)) <= _MAX_SHOWN:
        return repr(value)
    return f"a {type(value).__name__}"


def argument_error(where: str, argument: str, got: object, expected: str) -> TypeError:
    """For an argument of the wrong type: ``load: got policy='reshard', expected an ElasticPolicy``."""
    return TypeError(f"{where}: got {argument}={described(got)}, expected {expected}")


def check_argument(where: str, argument: str, got: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises ``argument_error`` unless it is an instance of one of these; a class in the place of one is none."""
    if isinstance(got, type) or not isinstance(got, kinds):
        raise argument_error(where, argument, got, expected)


def check_counts(where: str, **counts: object) -> None:
    """Raises ``argument_error`` for the first of these that is neither a whole number nor ``None``."""
    for argument, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, (Integral, type(None))):
            raise argument_error(where, argument, got, "a whole number")


_HEADINGS: dict[ProblemKind, str] = {
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
    "cannot_sync": "Tensors that cannot be synced",
    "cannot_reshard": "Components that cannot cross to this world",
    "unexpected_key": "Saved entries that nothing asks for",
    "policy_name": "Names of the policy that cannot be followed",
}

_ERROR_OF_KIND: dict[ProblemKind, type[StateRefusedError]] = {
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
    "cannot_sync": SyncMismatchError,
    "cannot_reshard": ReshardError,
    "unexpected_key": ReshardError,
    "policy_name": ReshardError,
}


def listed(problems: Sequence[Problem]) -> list[str]:
    """A line for each of the first ten, and how many there are more."""
    lines = [f"  {problem}" for problem in problems[:_MAX_LINES_PER_KIND]]
    if len(problems) > _MAX_LINES_PER_KIND:
        lines.append(f"  ... and {len(problems) - _MAX_LINES_PER_KIND} more")
    return lines


def refusal(operation: str, problems: Iterable[Problem], report: Any = None) -> StateRefusedError:
    """The error for these problems: the class they share, or ``StateRefusedError`` where they are of several."""
    unique = tuple(dict.fromkeys(problems))
    classes = {_ERROR_OF_KIND[problem.kind] for problem in unique}
    error_class = classes.pop() if len(classes) == 1 else StateRefusedError
    return error_class(operation, unique, report)
