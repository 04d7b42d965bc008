"""Chooses the training step to load: a given one, the latest, or the last good one, the same on all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import NoCheckpointError, UnknownFormatError, named
from torchtitan_ext.storage.commit.steps import find_steps, last_finished, patterns_in, step_of, step_paths
from torchtitan_ext.storage.formats.detect import checkpoints_in, format_of
from torchtitan_ext.storage.inspect.verify import find_damage

Step = int | Literal["latest", "last-good"]

_LISTING = "the steps of the run were looked for; nothing was changed"
_VERIFYING = "files were verified; nothing was changed"

_MAX_LISTED = 8


def choose_step(
    run_dir: str | os.PathLike[str],
    step: Step,
    phases: Phases,
    pattern: str | None = None,
    fallback: str | os.PathLike[str] | None = None,
) -> Path:
    """The path of a step's checkpoint, the same on every rank. Collective.

    For the last good step each rank reads and verifies a part of the files; the coordinator warns of skipped steps.

    Args:
        fallback: A second directory of the run; a step that both have finished is taken from the first.

    Raises:
        NoCheckpointError: The run has no such step, or no good one. The same on every rank.
    """
    run = Path(run_dir)

    def look(_: object) -> tuple[dict[int, bool], dict[int, Path], str]:
        steps, paths = find_steps(run, pattern), step_paths(run, pattern)
        if fallback is not None:
            others = step_paths(Path(fallback), pattern)
            for number, is_finished in find_steps(Path(fallback), pattern).items():
                if not steps.get(number, False):
                    steps[number], paths[number] = is_finished, others[number]
        return steps, paths, "" if any(steps.values()) else why_no_step(run, pattern)

    steps, paths, reason = phases.to_coordinator("choose", lambda: None, look, doing=_LISTING)
    if step == "last-good":
        return _last_good(run, steps, paths, reason, phases)
    number = step if isinstance(step, int) else last_finished(steps)
    if number is not None and steps.get(number, False):
        return paths[number]
    wanted = "no finished checkpoint" if step == "latest" else f"no finished checkpoint of step {step}"
    raise NoCheckpointError(str(run), f"has {wanted}: {_listed(steps, reason)}")


def _last_good(run: Path, steps: Mapping[int, bool], paths: Mapping[int, Path], no_steps: str, phases: Phases) -> Path:
    skipped: list[str] = []
    for number in sorted(steps, reverse=True):
        path = paths[number]
        reason: str | None = "it has no .metadata: its save has not finished"
        if steps[number]:
            verify = partial(find_damage, path, part=phases.rank, num_parts=phases.size)
            found = phases.on_all("verify", verify, doing=_VERIFYING)
            reason = next((damage for damage in found if damage is not None), None)
        if reason is None:
            if skipped:
                _warn_of_skipped(run, number, skipped, phases)
            return path
        skipped.append(f"step {number}: {reason}")
    reasons = "; ".join(skipped[:_MAX_LISTED]) or f"it has no step at all{no_steps}"
    raise NoCheckpointError(str(run), f"has no good checkpoint: {reasons}")


def _warn_of_skipped(run: Path, number: int, skipped: Sequence[str], phases: Phases) -> None:
    """Warns on the coordinator, in a phase: where a filter turns warnings into errors, all ranks raise the error."""
    text = f"{run}: step {number} is loaded, {len(skipped)} newer skipped: {'; '.join(skipped)}"
    phases.to_coordinator("choose", lambda: None, lambda _: warnings.warn(text, stacklevel=2), doing=_VERIFYING)


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


def _listed(steps: Mapping[int, bool], reason: str) -> str:
    finished = sorted(number for number, is_finished in steps.items() if is_finished)
    text = f"it has steps {', '.join(map(str, finished[-_MAX_LISTED:]))}" if finished else f"it has none{reason}"
    half = sorted(number for number, is_finished in steps.items() if not is_finished)
    return f"{text}; not finished are {', '.join(map(str, half[-_MAX_LISTED:]))}" if half else text
