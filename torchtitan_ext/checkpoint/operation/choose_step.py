"""Chooses the training step to load: a given one, the latest, or the last good one, the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import AbsentRunError, NoCheckpointError, UnknownFormatError, named, warn
from torchtitan_ext.storage.commit.branch import abandoned_steps, finished_steps, steps_aside
from torchtitan_ext.storage.commit.steps import folders_in_fallback, is_absent, patterns_in, step_of, step_paths
from torchtitan_ext.storage.formats.detect import checkpoints_in, format_of
from torchtitan_ext.storage.inspect.verify import find_damage
from torchtitan_ext.storage.location import is_local, place_at
from torchtitan_ext.storage.runs.remote_steps import remote_steps

StepChoice = int | Literal["latest", "last-good"]

_LISTING = "the steps of the run were looked for; nothing was changed"
_VERIFYING = "files were verified; nothing was changed"

_MAX_LISTED = 8


def choose_step(
    run_dir: str | os.PathLike[str],
    step: StepChoice,
    phases: Phases,
    pattern: str | None = None,
    fallback: str | os.PathLike[str] | None = None,
) -> Path | str:
    """The path of a step's checkpoint, or its URL in a run at one, the same on every rank. Collective.

    Of a run that was set back, the latest and the last good step are of the branch of its last commit.

    For the last good step each rank reads and verifies a part of the files; the coordinator warns of skipped steps.

    Args:
        fallback: A directory with steps of this run and of others; a step that is finished in both is the run's own.

    Raises:
        AbsentRunError: Only the fallback has steps, and no number was given. The same on every rank.
        NoCheckpointError: The run has no such step, or no good one. The same on every rank.
    """
    others = [] if fallback is None else list(map(Path, folders_in_fallback(run_dir, fallback)))
    run = Path(run_dir) if is_local(run_dir) else os.fspath(run_dir)

    def look(_: object) -> _Found:
        found = _find([run, *others], pattern) if isinstance(run, Path) else _find_at_url(run, others, pattern)
        newest = max(found.living, default=None)
        if fallback is not None and newest is not None and not isinstance(step, int) and found.is_absent:
            raise AbsentRunError(str(run), os.path.dirname(found.finished[newest]), newest)
        if fallback is None or found.finished or not isinstance(run, Path):
            return found
        return replace(found, reason=found.reason + _of_other_runs(Path(fallback)))

    found = phases.to_coordinator("choose", lambda: None, look, doing=_LISTING)
    if step == "last-good":
        return _last_good(run, found, phases)
    number = step if isinstance(step, int) else max(found.living, default=None)
    if number is not None and number in found.finished:
        return found.finished[number]
    wanted = "no finished checkpoint" if step == "latest" else f"no finished checkpoint of step {step}"
    aside = _aside([run, *others], number, pattern, phases) if isinstance(run, Path) else ""
    detail = f"has {wanted}: {_listed(found.finished, found.unfinished, found.reason)}{aside}"
    raise NoCheckpointError(str(run), detail, has_steps=bool(found.finished))


@dataclass(frozen=True)
class _Found:
    """The steps of a run, in its directories or at its URL.

    Attributes:
        finished: Of a step that several directories have, the one that the run has not left behind, of the first.
        unfinished: The steps that have finished in none.
        living: The finished steps that the run has not left behind.
        is_absent: Whether nothing is at the run's own place.
        reason: Why there is no finished step, as the end of a sentence.
    """

    finished: Mapping[int, Path | str]
    unfinished: Collection[int]
    living: set[int]
    is_absent: bool
    reason: str = ""


def _find(runs: Sequence[Path], pattern: str | None) -> _Found:
    steps = finished_steps(runs, pattern)
    abandoned = abandoned_steps(steps)
    # Later ones count: the first directory's, of what is not left behind.
    order = sorted(steps, key=lambda one: (one[1] not in abandoned, -runs.index(one[1].parent)))
    finished = dict(order)
    unfinished = {number: path for run in runs for number, path in step_paths(run, pattern).items()}
    unfinished = {number: path for number, path in unfinished.items() if number not in finished}
    living = {number for number, path in finished.items() if path not in abandoned}
    return _Found(finished, unfinished, living, is_absent(runs[0]), "" if finished else why_no_step(runs[0], pattern))


def _find_at_url(run: str, others: Sequence[Path], pattern: str | None) -> _Found:
    own = remote_steps(run, pattern)
    finished: dict[int, Path | str] = {**dict(finished_steps(others, pattern)), **own.finished}
    return _Found(finished, own.unfinished, set(finished), not (own.finished or own.unfinished))


def _last_good(run: Path | str, found: _Found, phases: Phases) -> Path | str:
    skipped: list[str] = []
    for number in sorted({*found.living, *found.unfinished}, reverse=True):
        path = found.finished.get(number)
        reason: str | None = "it has no .metadata: its save has not finished"
        if path is not None:
            verify = partial(find_damage, place_at(path), part=phases.rank, num_parts=phases.size)
            damages = phases.on_all("verify", verify, doing=_VERIFYING)
            reason = next((damage for damage in damages if damage is not None), None)
            if reason is None:
                if skipped:
                    _warn_of_skipped(run, number, skipped, phases)
                return path
        skipped.append(f"step {number}: {reason}")
    reasons = "; ".join(skipped[:_MAX_LISTED]) or f"it has no step at all{found.reason}"
    raise NoCheckpointError(str(run), f"has no good checkpoint: {reasons}", has_steps=bool(found.finished))


def _aside(runs: Sequence[Path], number: int | None, pattern: str | None, phases: Phases) -> str:
    """Where a step that is not in the run was set aside, as the end of a sentence."""

    def look(_: object) -> list[Path]:
        return [
            path for run in runs for path in steps_aside(run) if number is not None and step_of(path, pattern) == number
        ]

    found = phases.to_coordinator("choose", lambda: None, look, doing=_LISTING)
    return f"; the run was set back and has left it behind, load it by its path: {named(found)}" if found else ""


def _warn_of_skipped(run: Path | str, number: int, skipped: Sequence[str], phases: Phases) -> None:
    """Warns on the coordinator, in a phase: where a filter turns warnings into errors, all ranks raise the error."""
    text = f"{run}: step {number} is loaded, {len(skipped)} newer skipped: {'; '.join(skipped)}"
    phases.to_coordinator("choose", lambda: None, lambda _: warn(text), doing=_VERIFYING)


def why_no_step(run: Path, pattern: str | None) -> str:
    """Why a run has no finished step, as the end of a sentence; empty where its steps are just not finished."""
    if not run.is_dir():
        return ", and is not there"
    known = [one.text for one in patterns_in(run)]
    if pattern is None and len(known) > 1:
        return f"; its directories are named in several ways, choose one: step_pattern={' or '.join(map(repr, known))}"
    paths = step_paths(run, pattern)
    held = checkpoints_in(paths[max(paths)]) if paths else []
    if held:
        path = paths[max(paths)]
        return f"; {path.name} holds checkpoints of its own, load them one by one: {path / held[0]}"
    try:
        format_of(run)
    except (UnknownFormatError, OSError):
        held = checkpoints_in(run)
        return f"; it holds checkpoints of other names: {named(held, _MAX_LISTED)}" if held else ""
    of_run = "" if step_of(run) is None else f", or give its run: {run.parent}"
    return f"; it is a checkpoint itself: load it without step={of_run}"


def _of_other_runs(fallback: Path) -> str:
    folders = sorted(path.name for path in fallback.iterdir() if path.is_dir()) if fallback.is_dir() else []
    others = f", it has {named(folders, _MAX_LISTED)}" if folders else ""
    return f"; the fallback {fallback} has none of this run{others}"


def _listed(finished: Collection[int], unfinished: Collection[int], reason: str) -> str:
    whole, half = sorted(finished), sorted(unfinished)
    text = f"it has steps {', '.join(map(str, whole[-_MAX_LISTED:]))}" if whole else f"it has none{reason}"
    return f"{text}; not finished are {', '.join(map(str, half[-_MAX_LISTED:]))}" if half else text
