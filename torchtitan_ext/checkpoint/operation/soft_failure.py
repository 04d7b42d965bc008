"""Saves that storage refuses: tried again, written elsewhere, or only warned of, the same on all ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

from torchtitan_ext.checkpoint.operation.phases import Phases, key_of
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult
from torchtitan_ext.errors import CheckpointFailedError, clear_frames, warn

logger = logging.getLogger(__name__)

# By ``key_of`` a group how many saves have failed since the last that did not, by directory of the run. Only the
# operation whose turn it is on a group changes its counts.
_failures: WeakKeyDictionary[object, Counter[str]] = WeakKeyDictionary()

_WARNING = "the failure of a save was warned of; nothing was saved"
_TRYING = "storage had refused a save, and it was tried again"


def save_with_retries(save: Callable[[SaveJob], SaveResult], job: SaveJob, phases: Phases) -> SaveResult:
    """Calls ``save`` until it succeeds, with the job of each attempt. Collective.

    Raises:
        CheckpointFailedError: What the last attempt raised, unless it is only warned of.
    """
    handling = job.on_storage_error
    failures = _failures.setdefault(key_of(phases.group), Counter())
    run = "" if job.path is None else str(Path(job.path).absolute().parent)
    places = [job.path] * (1 + handling.retries) + ([] if job.fallback_place is None else [job.fallback_place])
    causes: dict[str, None] = {}
    last: CheckpointFailedError | None = None
    for path in places:
        if last is not None:
            phases.on_all("retry", lambda: None, doing=_TRYING)
            phases.num_retries += 1
        try:
            saved = save(job if path is job.path else dataclasses.replace(job, path=path))
        except CheckpointFailedError as error:
            if not error.is_of_storage:
                raise
            clear_frames(error)
            causes[str(error)], last = None, error
        else:
            failures.pop(run, None)
            return saved
    assert last is not None, "a save without an attempt, please report"
    failures[run] += 1
    if handling.on_error == "raise" or failures[run] >= handling.max_failures:
        raise last
    in_a_row = f"{failures[run]} in a row, {handling.max_failures} raise"
    text = f"save: nothing was saved ({in_a_row}): {'; '.join(causes)}"
    phases.to_coordinator("warn", lambda: None, lambda _: warn(text), doing=_WARNING)
    phases.log_metrics(logger, 0, failures=failures[run])
    return SaveResult("", "", 0, dict(phases.seconds), error=text)
