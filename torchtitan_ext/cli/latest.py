"""``torchtitan-ext latest``."""

from __future__ import annotations

from pathlib import Path

import typer

from torchtitan_ext.cli.options import Json, Run
from torchtitan_ext.cli.output import UNREADABLE, print_json, print_problem
from torchtitan_ext.errors import UnknownFormatError, named
from torchtitan_ext.storage.formats import format_of
from torchtitan_ext.storage.run_listing import list_steps
from torchtitan_ext.storage.runs import latest
from torchtitan_ext.storage.steps import step_of

_MAX_NAMED = 8


def run(
    run_dir: Run,
    json: Json = False,
) -> None:
    """The newest finished checkpoint of a run. Reads no data: `verify` does.

    Exits with 3, and says why, where there is none.

    Example: torchtitan-ext latest outputs/checkpoint
    """
    path = latest(run_dir)
    reason = None if path is not None else _why_none(run_dir)
    if json:
        step = None if path is None else step_of(path)
        print_json({"path": None if path is None else str(path), "step": step, "reason": reason})
    elif path is not None:
        print(path)
    if reason is not None:
        print_problem(reason)
        raise typer.Exit(UNREADABLE)


def _why_none(run_dir: Path) -> str:
    """Why a run has no finished checkpoint. Raises OSError where there is no such directory."""
    steps = list_steps(run_dir)[::-1]
    if steps:
        what = [f"step {step.step} is {'of another kind' if step.state == 'other' else step.state}" for step in steps]
        return f"{run_dir} has no finished step: {named(what, _MAX_NAMED)}"
    try:
        format_of(run_dir)
    except UnknownFormatError:
        return f"{run_dir} has no step: expected directories step-<number> in it"
    return f"{run_dir} is a checkpoint itself, expected the directory of a run, with step-<number> in it"
