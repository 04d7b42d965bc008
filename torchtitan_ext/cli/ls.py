"""``torchtitan-ext ls``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.cli.options import Json, Run
from torchtitan_ext.cli.output import print_json, print_line, print_table, text_of_bytes, text_of_time
from torchtitan_ext.storage.run_listing import Leftover, ListedStep, find_leftovers, list_steps


def run(
    run_dir: Run,
    json: Json = False,
) -> None:
    """The steps of a run, who saves there, and what dead saves left. Reads no data.

    Example: torchtitan-ext ls outputs/checkpoint
    """
    steps, leftovers = list_steps(run_dir), find_leftovers(run_dir)
    if json:
        print_json(_plain(run_dir, steps, leftovers))
        return
    if steps:
        print_table(("step", "state", "bytes", "finished", "ranks", "saved by"), map(_row, steps))
    else:
        print_line(f"{run_dir} has no step")
    for line in lines_of(leftovers):
        print_line(line)


def lines_of(leftovers: Sequence[Leftover]) -> Iterator[str]:
    """What dead saves left, for people."""
    if leftovers:
        yield f"left by dead saves, {text_of_bytes(sum(leftover.num_bytes for leftover in leftovers))}:"
    for leftover in leftovers:
        yield f"  {leftover.path}"


def plain_leftovers(leftovers: Sequence[Leftover]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [{"path": str(leftover.path), "num_bytes": leftover.num_bytes} for leftover in leftovers]


def _row(step: ListedStep) -> Sequence[object]:
    finished_at = "-" if step.finished_at is None else text_of_time(step.finished_at)
    state = f"{step.state} ({step.format})" if step.state == "other" and step.format else step.state
    size = text_of_bytes(step.num_bytes)
    return step.step, state, size, finished_at, step.world_size or "-", f"{step.saver}, now" if step.saver else "-"


def _plain(run_dir: Path, steps: Sequence[ListedStep], leftovers: Sequence[Leftover]) -> dict[str, Any]:
    rows = [
        {
            "step": step.step,
            "state": step.state,
            "format": step.format,
            "num_bytes": step.num_bytes,
            "finished_at": step.finished_at,
            "world_size": step.world_size,
            "saver": step.saver,
        }
        for step in steps
    ]
    return {"path": str(run_dir), "steps": rows, "leftovers": plain_leftovers(leftovers)}
