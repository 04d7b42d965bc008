"""``torchtitan-ext gc``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan_ext.cli.commands.ls import (
    lines_aside,
    lines_left,
    lines_of,
    plain_left,
    plain_leftovers,
    refuse_checkpoint,
)
from torchtitan_ext.cli.options import Json, Run, StepNames, refusing_wrong_usage
from torchtitan_ext.cli.output import DIFFERS, print_json, print_line, print_problem, print_table, text_of_bytes
from torchtitan_ext.storage.commit.leftovers import checkpoint_names
from torchtitan_ext.storage.commit.steps import step_paths
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.leftovers import remaining, remove_left_save, store_time
from torchtitan_ext.storage.runs.listing import (
    Leftover,
    ListedStep,
    checkpoint_bytes,
    find_leftovers,
    freed_bytes,
    list_aside,
    list_steps,
)
from torchtitan_ext.storage.runs.object_runs import left_in_steps, list_object_steps, object_steps
from torchtitan_ext.storage.runs.retention import (
    remove_empty_branches,
    remove_leftovers,
    remove_step,
    steps_beyond,
    whole_beyond,
)


def run(
    run_dir: Run,
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many whole steps stay, counted from the latest.", show_default=False)
    ] = None,
    abandoned: Annotated[bool, typer.Option("--abandoned", help="Remove what the run has left behind.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only say what would be removed.")] = False,
    step_pattern: StepNames = None,
    json: Json = False,
) -> None:
    """Removes old steps of a run, and what dead saves left. Never files of others, nor a step that is being saved.

    Steps that are not whole do not count as kept. Steps that the run has left behind when it was set back neither count
    nor go, without --abandoned. Exits with 1 if something could not be removed.

    Example: torchtitan-ext gc outputs/checkpoint --keep 3 --yes
    """
    if isinstance(run_dir, Location):
        if abandoned:
            raise typer.BadParameter("no step of a run in an object store is left behind", param_hint="--abandoned")
        _collect_objects(run_dir, keep, yes, step_pattern, json)
        return
    if keep is None and not abandoned:
        raise typer.BadParameter("expected --keep with the number of steps that stay, or --abandoned")
    with refusing_wrong_usage():
        listed = {step.step: step for step in list_steps(run_dir, step_pattern)}
    if not listed:
        refuse_checkpoint(run_dir)
    paths = step_paths(run_dir, step_pattern)
    beyond = [] if keep is None else steps_beyond(run_dir, keep, pattern=step_pattern)
    beyond += [step.step for step in listed.values() if abandoned and step.state == "abandoned"]
    left_behind = list_aside(run_dir) if abandoned else []
    old = {number: paths[number] for number in beyond if listed[number].saver is None}
    leftovers = find_leftovers(run_dir, step_pattern)
    going = [*old.values(), *(step.path for step in left_behind)]
    freed = freed_bytes(going, leftovers)
    if not json:
        print_table(("step", "", "state", "bytes"), _rows(listed, old))
        for line in (*lines_aside(left_behind), *lines_of(leftovers)):
            print_line(line)
    if yes:
        for path in going:
            remove_step(path)
        if abandoned:
            remove_empty_branches(run_dir)
        try:
            remove_leftovers(run_dir, step_pattern)
        except OSError as error:
            print_problem(f"what dead saves left stays: {error}")
    stuck = _not_removed(going, find_leftovers(run_dir, step_pattern)) if yes else []
    freed -= min(freed, sum(left.num_bytes for left in stuck))
    told = {"path": str(run_dir), "keep": keep, "is_done": yes, **_of_steps(listed, old)}
    told |= {"abandoned": plain_leftovers(left_behind), "leftovers": plain_leftovers(leftovers)}
    _tell({**told, "freed_bytes": freed, "not_removed": [str(left.path) for left in stuck]}, json)


def _collect_objects(run: Location, keep: int | None, yes: bool, pattern: str | None, json: bool) -> None:
    """The same of a run in an object store; without --keep only what dead and replaced saves left goes."""
    with refusing_wrong_usage():
        steps = object_steps(run, pattern)
    listed = {step.step: step for step in list_object_steps(steps)}
    left = left_in_steps(steps, store_time(run))
    finished = {number: steps[number] for number, step in listed.items() if step.state == "finished"}
    numbers = [] if keep is None else whole_beyond(finished, keep)
    old = {number: steps[number] for number in numbers if listed[number].saver is None}
    freed = sum(listed[number].num_bytes for number in old)
    freed += sum(one.left.num_bytes for one in left if one.step not in old.values())
    stuck: list[str] = []
    if yes:
        for step in old.values():
            remove_step(step)
        stuck = [str(step) for step in old.values() if remaining(step)]
        stuck += [str(one.step) for one in left if not remove_left_save(one.step, one.left)]
    if not json:
        print_table(("step", "", "state", "bytes"), _rows(listed, old))
        for line in lines_left(left):
            print_line(line)
    told = {"path": str(run), "keep": keep, "is_done": yes, **_of_steps(listed, old), "leftovers": plain_left(left)}
    _tell({**told, "freed_bytes": freed, "not_removed": stuck}, json)


def _tell(told: dict[str, Any], json: bool) -> None:
    """Says what was removed, or would be. Exits with 1 where something stays that should not."""
    stuck, freed = told["not_removed"], text_of_bytes(told["freed_bytes"])
    if json:
        print_json(told)
    else:
        for place in stuck:
            print_line(f"not removed: {place}")
        print_line(f"freed {freed}" if told["is_done"] else f"{freed} would be freed: --yes does it")
    if stuck:
        raise typer.Exit(DIFFERS)


def _of_steps(listed: Mapping[int, ListedStep], old: Container[int]) -> dict[str, Any]:
    return {
        "kept": [_plain(listed[number]) for number in sorted(listed) if number not in old],
        "removed": [_plain(listed[number]) for number in sorted(listed) if number in old],
    }


def _rows(listed: Mapping[int, ListedStep], old: Container[int]) -> list[Sequence[object]]:
    return [
        (number, "goes" if number in old else "stays", step.state, text_of_bytes(step.num_bytes))
        for number, step in sorted(listed.items())
    ]


def _not_removed(old: Iterable[Path], leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Steps and leftovers that could not be removed, without directories that stay since they have files of others."""
    steps = [Leftover(path, checkpoint_bytes(path)) for path in old if path.is_dir()]
    return [left for left in (*steps, *leftovers) if _is_ours(left.path)]


def _is_ours(path: Path) -> bool:
    ours, others = checkpoint_names(path) if path.is_dir() else ([], [])
    return bool(ours) or not others


def _plain(step: ListedStep) -> dict[str, Any]:
    return {"step": step.step, "state": step.state, "num_bytes": step.num_bytes}
