"""``torchtitan-ext latest``."""

from __future__ import annotations

from pathlib import Path

import typer

from torchtitan_ext.cli.commands.ls import why_no_run
from torchtitan_ext.cli.options import Json, RunOrUrl, StepNames, refusing_wrong_usage
from torchtitan_ext.cli.output import UNREADABLE, print_json, print_problem
from torchtitan_ext.errors import named
from torchtitan_ext.storage.commit.steps import patterns_in, step_of
from torchtitan_ext.storage.location import is_local
from torchtitan_ext.storage.runs.listing import list_steps
from torchtitan_ext.storage.runs.remote_steps import remote_steps
from torchtitan_ext.storage.runs.retention import latest

_MAX_NAMED = 8

_KIND_OF = {"other": "of another kind", "folder": "a folder of several checkpoints"}


def run(run_dir: RunOrUrl, step_pattern: StepNames = None, json: Json = False) -> None:
    """The newest finished checkpoint of a run, which may be at a URL. Reads no data: `verify` does.

    Exits with 3, and says why, where there is none.

    Example: torchtitan-ext latest outputs/checkpoint
    """
    with refusing_wrong_usage():
        path = latest(run_dir, step_pattern=step_pattern)
    reason = None if path is not None else _why_none(run_dir, step_pattern)
    if json:
        step = None if path is None else step_of(Path(path), step_pattern)
        print_json({"path": None if path is None else str(path), "step": step, "reason": reason})
    elif path is not None:
        print(path)
    if reason is not None:
        print_problem(reason)
        raise typer.Exit(UNREADABLE)


def _why_none(place: str, pattern: str | None) -> str:
    """Why a run has no finished checkpoint. Raises OSError where there is no such directory."""
    if not is_local(place):
        half = [f"step {step} is not" for step in sorted(remote_steps(place, pattern).unfinished)]
        return f"{place} has no finished step" + (f": {named(half)}" if half else "")
    run_dir = Path(place)
    steps = list_steps(run_dir, pattern)[::-1]
    if steps:
        what = [f"step {step.step} is {_KIND_OF.get(step.state, step.state)}" for step in steps]
        return f"{run_dir} has no finished step: {named(what, _MAX_NAMED)}"
    known = [one.text for one in patterns_in(run_dir)]
    if pattern is None and len(known) > 1:
        return f"{run_dir} has steps named in several ways, choose one by --step-pattern: {named(known)}"
    no_step = f"{run_dir} has no step: expected directories {pattern or 'step-<number>'} in it"
    return why_no_run(run_dir) or no_step
