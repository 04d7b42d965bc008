"""Saves that storage refuses: tried again, written elsewhere, or only warned of, the same on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.save_phases import SaveJob, SaveResult
from torchtitan_ext.errors import CheckpointFailedError, clear_frames

logger = logging.getLogger(__name__)

_WARNING = "the failure of a save was warned of; nothing was saved"


def save_softly(
    save: Callable[[SaveJob], SaveResult], job: SaveJob, *, can_go_on: Callable[[], bool] = lambda: True
) -> SaveResult:
    """Calls ``save`` until it succeeds, with the job of each attempt. Collective.

    Args:
        can_go_on: Whether the state is still there for another attempt.

    Raises:
        CheckpointFailedError: What the last attempt raised, unless it is only warned of.
    """
    handling, phases = job.on_storage_error, job.phases
    attempts = [job] * (1 + handling.retries)
    fallback = handling.place_of(job.path)
    if fallback is not None:
        attempts.append(dataclasses.replace(job, path=fallback))
    failures = _failures_in_a_row(phases.group)
    run = "" if job.path is None else str(Path(job.path).absolute().parent)
    errors: list[CheckpointFailedError] = []
    for attempt in attempts:
        try:
            result = save(attempt)
        except CheckpointFailedError as error:
            if not error.is_of_storage:
                raise
            clear_frames(error)
            errors.append(error)
            phases.num_retries += 1
            if not can_go_on():
                break
        else:
            failures.pop(run, None)
            return result
    failures[run] += 1
    if handling.action == "raise" or failures[run] >= handling.max_failures:
        raise errors[-1]
    text = (
        f"save: nothing was saved ({failures[run]} in a row, {handling.max_failures} raise): "
        f"{'; '.join(dict.fromkeys(map(str, errors)))}"
    )
    phases.to_coordinator("warn", lambda: None, lambda _: warnings.warn(text, stacklevel=2), doing=_WARNING)
    phases.log_metrics(logger, 0, failures=failures[run])
    return SaveResult("", "", 0, dict(phases.seconds), error=text)


# Of a group that was destroyed nothing is left. Only the operation whose turn it is on a group changes its counts.
_failures: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
_failures_alone: Counter[str] = Counter()


def _failures_in_a_row(group: dist.ProcessGroup | None) -> Counter[str]:
    """How many saves have failed since the last that did not, by directory of the run."""
    return _failures_alone if group is None else _failures.setdefault(group, Counter())
