"""The latest checkpoint of a run, and the removal of old ones."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ext.errors import warn
from torchtitan_ext.storage.commit.branch import ABANDONED, abandoned_steps, branches_aside, latest_path, locked
from torchtitan_ext.storage.commit.leftovers import (
    checkpoint_names,
    find_dead_files,
    remove_dead_files,
    remove_dead_saves,
    remove_directory,
    remove_files,
    stage_path,
)
from torchtitan_ext.storage.commit.steps import has_finished, own_pattern, step_of, step_paths, steps_among
from torchtitan_ext.storage.inspect.verify import is_whole
from torchtitan_ext.storage.location import Location, Place, is_in_object_store, is_local
from torchtitan_ext.storage.metadata.saved_metadata import ranks_with_metadata
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import remove_object_step
from torchtitan_ext.storage.runs.remote_steps import remote_steps


@dataclass(frozen=True)
class Keep:
    """Which steps of a run stay when a new one is saved.

    Attributes:
        newest: How many of the newest whole ones, that one among them.
        every: And for good each step whose number is a multiple of this.
    """

    newest: int
    every: int | None = None

    def for_good(self, step: int) -> bool:
        """Whether a step stays, however old it gets."""
        return self.every is not None and step % self.every == 0


def latest(run_dir: str | os.PathLike[str], *, step_pattern: str | None = None) -> Path | str | None:
    """The newest finished step of a run, of the branch of its last commit; ``None`` without one. Not collective.

    A path, or of a run at a URL a URL. There fsspec lists, and the newest step that has a ``.metadata`` is the latest.

    A run that was set back to step 10 and saved step 11 has left its steps above behind: 11 is the latest. Reads no
    checkpoint: ``tte.load(..., step="last-good")`` does.

    Args:
        step_pattern: How the run names its steps, as in ``tte.load``.
    """
    if is_local(run_dir):
        return latest_path(Path(run_dir), step_pattern)
    if is_in_object_store(run_dir):
        step = _latest_object_step(Location(run_dir), step_pattern)
        return None if step is None else str(step)
    steps = remote_steps(os.fspath(run_dir), step_pattern).finished
    return steps[max(steps)] if steps else None


def remove_old_steps(saved: Place, keep: Keep, pattern: str | None = None) -> None:
    """Removes checkpoints older than the newest whole ones of a run, counted from the one just saved.

    A checkpoint that cannot be removed stays, with a warning.

    Args:
        saved: The checkpoint that was just saved.
        keep: What stays. A checkpoint that is not whole does not count among the newest.
        pattern: How the run names its steps; by default the known pattern that the name of ``saved`` matches.
    """
    for path in old_steps(saved, keep, pattern):
        remove_step(path)


def old_steps(saved: Place, keep: Keep, pattern: str | None = None) -> Sequence[Place]:
    """The checkpoints that ``remove_old_steps`` removes.

    ``saved`` counts as whole, also if its save still runs: if two or more stay, a whole checkpoint remains if that save
    fails.
    """
    own, pattern = step_of(saved, pattern), own_pattern(saved, pattern)
    run = saved.parent if isinstance(saved, Location) else Path(os.path.abspath(saved)).parent
    try:
        if isinstance(run, Location):
            urls = {number: Location(url) for number, url in remote_steps(str(run), pattern).finished.items()}
            return [urls[number] for number in whole_beyond(urls, keep.newest, own) if not keep.for_good(number)]
        paths = step_paths(run, pattern)
        beyond = steps_beyond(run, keep.newest, own, pattern)
        return [paths[number] for number in beyond if not keep.for_good(number)]
    except OSError as error:
        warn(f"old steps of {run} stay: they cannot be listed ({error})")
        return []


def steps_beyond(run: Path, keep: int, own: int | None = None, pattern: str | None = None) -> list[int]:
    """The steps older than the ``keep`` newest whole ones, newest first.

    Left out: directories in which each rank has metadata of its own, directories without a file of a DCP checkpoint,
    links, which may lead to another run, and steps that the run has left behind (``commit/branch.py``).

    Args:
        own: The step to count from. It counts as whole, whether it is there or not, and is never returned, nor are
            steps above it.
    """
    paths = step_paths(run, pattern)
    abandoned = abandoned_steps(item for item in paths.items() if has_finished(item[1]))
    living = {number: path for number, path in paths.items() if path not in abandoned}
    return [number for number in whole_beyond(living, keep, own) if _may_go(paths[number])]


def whole_beyond(steps: Mapping[int, Place], keep: int, own: int | None = None) -> list[int]:
    """Of these steps the numbers of those that are older than the ``keep`` newest whole ones, newest first; ``own`` as
    for ``steps_beyond``."""
    num_whole = 0
    old: list[int] = []
    below = {number for number in steps if own is None or number <= own}
    for number in sorted({*below, *([] if own is None else [own])}, reverse=True):
        if num_whole < keep:
            num_whole += number == own or is_whole(steps[number])
        elif number != own:
            old.append(number)
    return old


def _may_go(path: Path) -> bool:
    if path.is_symlink():
        return False
    ours, others = checkpoint_names(path)
    return bool(ours or not others) and not ranks_with_metadata(ours)


def remove_step(path: Place) -> None:
    """Removes a checkpoint; foreign files stay. The directory gets a hidden name first: no reader sees half of it."""
    if isinstance(path, Location):
        try:
            remove_object_step(path)
        except OSError as error:
            warn(f"{path} stays: it cannot be removed ({error})")
        return
    save_id = uuid.uuid4().hex
    with locked(path, save_id) as has_lock:
        if not has_lock:
            return
        try:
            ours, others = checkpoint_names(path)
            if others:
                remove_files(path, sorted(ours, key=lambda name: not name.endswith(".metadata")))
            else:
                os.rename(path, stage_path(path, save_id))
                remove_directory(stage_path(path, save_id), None)
        except OSError as error:
            warn(f"{path} stays: it cannot be removed ({error})")


def remove_leftovers(run: Path, pattern: str | None = None) -> None:
    """Removes leftovers of dead saves beside the steps of a run and in them, but not in a step whose save runs."""
    remove_dead_saves(run)
    for path in step_paths(run, pattern).values():
        if find_dead_files(path):
            with locked(path, uuid.uuid4().hex) as has_lock:
                if has_lock:
                    remove_dead_files(path)


def remove_empty_branches(run: Path) -> None:
    """Removes the directories of steps that were set aside, and what dead saves left there, where no step is left."""
    for folder in branches_aside(run):
        remove_dead_saves(folder)
        if not os.listdir(folder):
            folder.rmdir()
    if not branches_aside(run) and (run / ABANDONED).is_dir() and not os.listdir(run / ABANDONED):
        (run / ABANDONED).rmdir()


def _latest_object_step(run: Location, pattern: str | None = None) -> Location | None:
    """The newest finished step of a run; ``None`` without one. Asks the store of no step below it.

    Args:
        pattern: How the run names its steps, as in ``step_paths``.
    """
    folder = ObjectFolder(run)
    names = steps_among(folder.folders(), pattern)
    for number in sorted(names, reverse=True):
        if folder.stamp(f"{names[number]}/.metadata") is not None:
            return run / names[number]
    return None
