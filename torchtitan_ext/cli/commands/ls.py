"""``torchtitan-ext ls``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext import clock
from torchtitan_ext.cli.options import Json, Run, StepNames, refusing_wrong_usage
from torchtitan_ext.cli.output import (
    FORMAT_NAMES,
    count_of,
    print_json,
    print_line,
    print_table,
    text_of_bytes,
    text_of_time,
)
from torchtitan_ext.errors import UnknownFormatError, WrongValueError
from torchtitan_ext.storage.commit.steps import step_paths
from torchtitan_ext.storage.formats.detect import checkpoints_in, format_of
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.runs.listing import (
    Leftover,
    ListedStep,
    bytes_in,
    disk_bytes,
    find_leftovers,
    list_aside,
    list_steps,
)
from torchtitan_ext.storage.runs.object_runs import LeftInStep, left_in_steps, list_object_steps, object_steps


def run(run_dir: Run, step_pattern: StepNames = None, json: Json = False) -> None:
    """The steps of a run, who saves there, and what dead saves left. Reads no data.

    For a directory without steps: the checkpoints in it.

    Example: torchtitan-ext ls outputs/checkpoint
    """
    if isinstance(run_dir, Location):
        _list_objects(run_dir, step_pattern, json)
        return
    with refusing_wrong_usage():
        steps, leftovers = list_steps(run_dir, step_pattern), find_leftovers(run_dir, step_pattern)
    left_behind = list_aside(run_dir)
    if not steps:
        refuse_checkpoint(run_dir)
    inner = [] if steps else checkpoints_in(run_dir)
    if json:
        rows = [step._asdict() for step in steps]
        left = plain_leftovers(leftovers)
        on_disk = disk_bytes(step_paths(run_dir, step_pattern).values())
        found = {"steps": rows, "disk_bytes": on_disk, "leftovers": left, "checkpoints": inner}
        found["abandoned"] = plain_leftovers(left_behind)
        print_json({"path": str(run_dir), **found})
        return
    if steps:
        _print_steps(steps)
        on_disk = disk_bytes(step_paths(run_dir, step_pattern).values())
        if not any(step.checkpoints for step in steps) and on_disk < sum(step.num_bytes for step in steps):
            print_line(f"steps share files: {text_of_bytes(on_disk)} on the disk")
    elif inner:
        print_table(("checkpoint", "format", "bytes"), inner_rows(run_dir, inner))
    else:
        print_line(f"{run_dir} has no step")
    for line in (*lines_aside(left_behind), *lines_of(leftovers)):
        print_line(line)


def _list_objects(run: Location, pattern: str | None, json: bool) -> None:
    """The same of a run in an object store, of which there are no checkpoints of other formats."""
    with refusing_wrong_usage():
        folders = object_steps(run, pattern)
    steps, left = list_object_steps(folders), left_in_steps(folders, clock.utc_now())
    if json:
        rows = [step._asdict() for step in steps]
        print_json({"path": str(run), "steps": rows, "leftovers": plain_left(left)})
        return
    if steps:
        _print_steps(steps)
    else:
        print_line(f"{run} has no step")
    for line in lines_left(left):
        print_line(line)


def lines_left(left: Sequence[LeftInStep]) -> Iterator[str]:
    """The lines about objects of saves that are no checkpoint any more."""
    if left:
        size = text_of_bytes(sum(one.left.num_bytes for one in left))
        yield f"of dead and replaced saves, {size}, which gc --yes removes:"
    for one in left:
        yield f"  {one.step}: save {one.left.save_id}, {count_of(len(one.left.names), 'object')}"


def plain_left(left: Sequence[LeftInStep]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [{"path": str(one.step), **one.left._asdict()} for one in left]


def _print_steps(steps: Sequence[ListedStep]) -> None:
    print_table(("step", "state", "bytes", "finished", "ranks", "saved by"), map(_row, steps))


def why_no_run(path: Path) -> str:
    """Why a directory without steps is none of a run, where it is a checkpoint itself; else empty."""
    try:
        format_of(path)
    except UnknownFormatError:
        return ""
    return f"{path} is a checkpoint itself, expected the directory of a run, with step-<number> in it"


def refuse_checkpoint(path: Path) -> None:
    """Raises WrongValueError for a directory without steps that is a checkpoint itself."""
    reason = why_no_run(path)
    if reason:
        raise WrongValueError(reason)


def lines_aside(steps: Sequence[Leftover]) -> Iterator[str]:
    """The lines about steps that were set aside."""
    if steps:
        size = text_of_bytes(sum(step.num_bytes for step in steps))
        yield f"abandoned when the run was set back, {size}, which gc --abandoned --yes removes:"
    for step in steps:
        yield f"  {step.path}"


def inner_rows(folder: Path, names: Sequence[str]) -> Iterator[Sequence[object]]:
    """A row for each checkpoint in a folder: name, format, bytes."""
    for name in names:
        yield name, FORMAT_NAMES[format_of(folder / name)], text_of_bytes(bytes_in(folder / name))


def lines_of(leftovers: Sequence[Leftover]) -> Iterator[str]:
    """The lines about files that dead saves left."""
    if leftovers:
        yield f"left by dead saves, {text_of_bytes(sum(leftover.num_bytes for leftover in leftovers))}:"
    for leftover in leftovers:
        yield f"  {leftover.path}"


def plain_leftovers(leftovers: Sequence[Leftover]) -> list[dict[str, Any]]:
    """The files that dead saves left, for JSON."""
    return [{"path": str(leftover.path), "num_bytes": leftover.num_bytes} for leftover in leftovers]


def _row(step: ListedStep) -> Sequence[object]:
    finished_at = "-" if step.finished_at is None else text_of_time(step.finished_at)
    kind = step.format if step.state == "other" else ", ".join(step.checkpoints)
    state = f"{step.state} ({kind})" if kind else step.state
    size = text_of_bytes(step.num_bytes)
    return step.step, state, size, finished_at, step.world_size or "-", f"{step.saver}, now" if step.saver else "-"
