"""``torchtitan-ext watch``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer

from torchtitan_ext.cli.options import Json, Run, StepNames, refusing_wrong_usage
from torchtitan_ext.cli.output import count_of, print_json, print_line, print_problem, text_of_bytes, text_of_time
from torchtitan_ext.errors import named
from torchtitan_ext.storage.commit.save_lock import STALE_SECONDS
from torchtitan_ext.storage.runs.changes import Change, RunWatch

Interval = Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.01)]
NumSteps = Annotated[
    int | None, typer.Option("--steps", metavar="N", help="End when so many steps have landed; 0: at once.", min=0)
]

_MAX_FOUND = 10


def run(
    run_dir: Run,
    interval: Interval = 2.0,
    num_steps: NumSteps = None,
    step_pattern: StepNames = None,
    json: Json = False,
) -> None:
    """The steps of a run as they land, a line each, until Ctrl-C; first the ten newest that are there.

    Tells also saves that left no step, and steps that go. Reads no data: `verify` tells damage.

    Example: torchtitan-ext watch outputs/checkpoint
    """
    watch, problem, num_landed = RunWatch(run_dir, step_pattern), "", 0
    with suppress(KeyboardInterrupt), refusing_wrong_usage():
        while True:
            try:
                changes, text = watch.look(), ""
            except OSError as error:
                if num_steps == 0:
                    raise
                changes, text = [], f"{run_dir}: {error.strerror}; looking again"
            if text not in ("", problem):
                print_problem(text)
            problem = text
            num_old = max(0, sum(change.kind == "found" for change in changes) - _MAX_FOUND)
            for kind, step in changes[num_old:]:
                at = time.time() if step.finished_at is None else step.finished_at
                if json:
                    print_json({"kind": kind, "at": at, **step._asdict()})
                else:
                    print_line(f"{text_of_time(at)}  step {step.step}: {', '.join(_texts(Change(kind, step)))}")
            sys.stdout.flush()
            num_landed += sum(change.kind in ("landed", "replaced") for change in changes)
            if num_steps is not None and num_landed >= num_steps:
                return
            time.sleep(interval)


def _texts(change: Change) -> Iterator[str]:
    kind, step = change
    if kind == "removed":
        yield "removed"
    elif kind == "failed":
        yield f"failed: the save of {step.saver}, has left no step"
    elif kind == "silent":
        yield f"stands still: {step.saver}, no sign of life for {STALE_SECONDS:.0f} s"
    else:
        by = "" if step.world_size is None else f" by {count_of(step.world_size, 'rank')}"
        phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in step.seconds.items())
        yield f"{text_of_bytes(step.num_bytes)}{by}"
        yield from [f"{sum(step.seconds.values()):.2f} s ({phases})"] if phases else []
        yield from [f"{text_of_bytes(step.reused_bytes)} reused"] if step.reused_bytes else []
        yield from ["saved again"] if kind == "replaced" else []
        yield from [f"set back to {step.parent}: {named(step.left_behind)} left behind"] if step.left_behind else []
