"""``torchtitan-ext latest``."""

from __future__ import annotations

import typer

from torchtitan_ext.cli.options import Json, Run
from torchtitan_ext.cli.output import UNREADABLE, print_json
from torchtitan_ext.storage.runs import latest
from torchtitan_ext.storage.steps import step_of


def run(
    run_dir: Run,
    json: Json = False,
) -> None:
    """The newest finished checkpoint of a run. Reads no data: `verify` does.

    Example: torchtitan-ext latest outputs/checkpoint
    """
    path = latest(run_dir)
    if json:
        print_json({"path": None if path is None else str(path), "step": None if path is None else step_of(path)})
    elif path is not None:
        print(path)
    if path is None:
        raise typer.Exit(UNREADABLE)
