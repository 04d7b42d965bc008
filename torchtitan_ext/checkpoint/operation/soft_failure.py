"""Saves that storage refuses: tried again, written elsewhere, or only warned of, the same on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.phases import Phases, key_of
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError, SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult
from torchtitan_ext.errors import CheckpointFailedError, clear_frames, warn

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WARNING = "the failure of a save was warned of; nothing was saved"
_TRYING = "storage had refused a save, and it was tried again"


def save_with_retries(
    save: Callable[[SaveJob], SaveResult], job: SaveJob, phases: Phases, *, can_go_on: Callable[[], bool] = lambda: True
) -> SaveResult:
    """Calls ``save`` until it succeeds, with the job of each attempt. Collective.

    Args:
        can_go_on: Whether this rank still has the state for another attempt, for which all ranks need theirs.

    Raises:
        CheckpointFailedError: What the last attempt raised, unless it is only warned of.
    """
    handling = job.on_storage_error

    def attempts() -> Iterator[Callable[[], SaveResult]]:
        yield partial(save, job)
        for path in handling.other_places(job.path, job.fallback_place):
            if not all(phases.on_all("retry", can_go_on, doing=_TRYING)):
                return
            phases.num_retries += 1
            yield partial(save, job if path is job.path else dataclasses.replace(job, path=path))

    outcome = try_in_turn(attempts(), handling, phases.group, job.path, _cause)
    if not isinstance(outcome, NothingSaved):
        return outcome
    text = f"save: nothing was saved ({outcome.in_a_row}): {outcome.cause}"
    phases.to_coordinator("warn", lambda: None, lambda _: warn(text), doing=_WARNING)
    phases.log_metrics(logger, 0, failures=outcome.num_failures)
    return SaveResult("", "", 0, dict(phases.seconds), error=text)


def _cause(error: BaseException) -> str | None:
    return str(error) if isinstance(error, CheckpointFailedError) and error.is_of_storage else None


@dataclass(frozen=True)
class NothingSaved:
    """A save that storage refused in each attempt, and that is only warned of."""

    cause: str
    num_failures: int
    max_failures: int

    @property
    def in_a_row(self) -> str:
        return f"{self.num_failures} in a row, {self.max_failures} raise"


# By ``key_of`` a group how many saves have failed since the last that did not, by directory of the run. Only the
# operation whose turn it is on a group changes its counts.
_failures: WeakKeyDictionary[object, Counter[str]] = WeakKeyDictionary()


def try_in_turn(
    attempts: Iterable[Callable[[], T]],
    handling: OnStorageError,
    group: dist.ProcessGroup | None,
    path: str | os.PathLike[str] | None,
    cause_of: Callable[[BaseException], str | None],
) -> T | NothingSaved:
    """What the first attempt returns that storage does not refuse. The same on all ranks, where attempts are.

    Args:
        group, path: Of the save: its failures in a row are counted by the group and the directory of the run.
        cause_of: Why an attempt failed, where that is storage.

    Raises:
        BaseException: What storage did not cause; else what the last attempt raised, unless it is only warned of.
    """
    failures = _failures.setdefault(key_of(group), Counter())
    run = "" if path is None else str(Path(path).absolute().parent)
    causes: dict[str, None] = {}
    last: BaseException | None = None
    for attempt in attempts:
        try:
            saved = attempt()
        except BaseException as error:
            cause = cause_of(error)
            if cause is None:
                raise
            clear_frames(error)
            causes[cause], last = None, error
        else:
            failures.pop(run, None)
            return saved
    assert last is not None, "a save without an attempt, please report"
    failures[run] += 1
    if handling.on_error == "raise" or failures[run] >= handling.max_failures:
        raise last
    return NothingSaved("; ".join(causes), failures[run], handling.max_failures)
