"""Which step of a run is loaded: a given one, the latest, or the last good one, on which all ranks agree."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchtitan_ext.checkpoint.phases import Phases
from torchtitan_ext.errors import NoCheckpointError, argument_error
from torchtitan_ext.storage.steps import find_steps, last_finished, step_of, step_path
from torchtitan_ext.storage.verify import find_damage

Step = int | Literal["latest", "last-good"]

_LISTING = "the steps of the run were looked for; nothing was changed"
_VERIFYING = "files were verified; nothing was changed"

_MAX_LISTED = 8


def check_step(path: Any, step: Any) -> None:
    """Raises TypeError or ValueError unless this is a step of a run at ``path``, or ``None``."""
    if step is None:
        return
    if not (isinstance(step, int) and not isinstance(step, bool)) and step not in ("latest", "last-good"):
        raise argument_error("load", "step", step, "a number, 'latest' or 'last-good'")
    if path is None:
        raise ValueError(f"load: got step={step!r} without a path, expected the directory of the run")


def check_keep(keep: Any, path: str | os.PathLike[str] | None) -> None:
    """Raises TypeError or ValueError unless so many steps of the run that ``path`` is in can be kept."""
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise argument_error("save", "keep", keep, "a whole number")
    if keep < 1:
        raise ValueError(f"save: got keep={keep}, expected at least 1")
    if path is None or step_of(path) is None:
        raise ValueError(f"save: got keep={keep} and the path {str(path)!r}, expected a directory <run>/step-<number>")


def choose_step(run_dir: str | os.PathLike[str], step: Step, phases: Phases) -> Path:
    """The checkpoint of a step, the same on every rank. Collective.

    For the last good one all ranks read and verify a part of the files; what is skipped is a warning on the
    coordinator.

    Raises:
        NoCheckpointError: There is none, or none that is good. The same on every rank.
    """
    run = Path(run_dir)
    steps: dict[int, bool] = phases.to_coordinator("choose", lambda: None, lambda _: find_steps(run), doing=_LISTING)
    if step == "last-good":
        return _last_good(run, steps, phases)
    number = step if isinstance(step, int) else last_finished(steps)
    if number is not None and steps.get(number, False):
        return step_path(run, number)
    wanted = "no finished checkpoint" if step == "latest" else f"no finished checkpoint of step {step}"
    raise NoCheckpointError(str(run), f"has {wanted}: {_listed(steps)}")


def _last_good(run: Path, steps: dict[int, bool], phases: Phases) -> Path:
    skipped: list[str] = []
    for number in sorted(steps, reverse=True):
        path = step_path(run, number)
        reason: str | None = "it has no .metadata: its save has not finished"
        if steps[number]:
            found = phases.on_all("verify", lambda: _damage_on(path, phases), doing=_VERIFYING)  # noqa: B023
            reason = next((damage for damage in found if damage is not None), None)
        if reason is None:
            if skipped:
                _warn_of_skipped(run, number, skipped, phases)
            return path
        skipped.append(f"step {number}: {reason}")
    detail = f"has no good checkpoint: {'; '.join(skipped[:_MAX_LISTED]) or 'it has no step at all'}"
    raise NoCheckpointError(str(run), detail)


def _warn_of_skipped(run: Path, number: int, skipped: Sequence[str], phases: Phases) -> None:
    """Warns on the coordinator, in a phase: where a filter turns warnings into errors, all ranks hear of it."""
    text = f"{run}: step {number} is loaded, {len(skipped)} newer skipped: {'; '.join(skipped)}"
    phases.to_coordinator("choose", lambda: None, lambda _: warnings.warn(text, stacklevel=2), doing=_VERIFYING)


def _damage_on(path: Path, phases: Phases) -> str | None:
    return find_damage(path, part=phases.rank, num_parts=phases.size)


def _listed(steps: dict[int, bool]) -> str:
    finished = sorted(number for number, is_finished in steps.items() if is_finished)
    text = f"it has steps {', '.join(map(str, finished[-_MAX_LISTED:]))}" if finished else "it has none"
    half = sorted(number for number, is_finished in steps.items() if not is_finished)
    return f"{text}; not finished are {', '.join(map(str, half[-_MAX_LISTED:]))}" if half else text
