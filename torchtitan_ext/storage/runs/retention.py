"""The checkpoints of a run: the latest, and which of them stay."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.commit.commit import lock_path
from torchtitan_ext.storage.commit.leftovers import (
    checkpoint_names,
    find_dead_files,
    remove_dead_files,
    remove_dead_saves,
    remove_directory,
    remove_files,
    stage_path,
)
from torchtitan_ext.storage.commit.save_lock import SaveLock
from torchtitan_ext.storage.commit.steps import has_finished, pattern_of, step_of, step_paths
from torchtitan_ext.storage.inspect.verify import is_whole
from torchtitan_ext.storage.metadata.saved_metadata import ranks_with_metadata


def latest(run_dir: str | os.PathLike[str], *, step_pattern: str | None = None) -> Path | None:
    """The checkpoint of the highest step in a run whose save has finished; ``None`` where there is none. Not
    collective, and reads no checkpoint: ``tte.load(..., step="last-good")`` does.

    Args:
        step_pattern: How the run names its steps, as in ``tte.load``.
    """
    paths = step_paths(Path(run_dir), step_pattern)
    return next((paths[number] for number in sorted(paths, reverse=True) if has_finished(paths[number])), None)


def remove_old_steps(saved: Path, keep: int, pattern: str | None = None) -> None:
    """Removes what is older than the ``keep`` newest whole checkpoints of a run; never the one that was just saved.

    A checkpoint that is not whole does not count as one of them, so a good one behind it stays. What cannot be removed
    stays, with a warning.

    Args:
        pattern: How the run names its steps; by default the known pattern that the name of ``saved`` has.
    """
    for path in old_steps(saved, keep, pattern):
        remove_step(path)


def old_steps(saved: Path, keep: int, pattern: str | None = None) -> list[Path]:
    """What is older than the ``keep`` newest whole checkpoints of a run; never the one that was just saved.

    That one counts as whole. So does one that is being saved: with a ``keep`` of 2 or more a whole one stays where its
    save fails.
    """
    run, own, known = Path(os.path.abspath(saved)).parent, step_of(saved, pattern), pattern_of(saved)
    pattern = known.text if pattern is None and known is not None else pattern
    try:
        paths = step_paths(run, pattern)
        return [paths[number] for number in steps_beyond(run, keep, own, pattern)]
    except OSError as error:
        warnings.warn(f"old steps of {run} stay: they cannot be listed ({error})", stacklevel=2)
        return []


def steps_beyond(run: Path, keep: int, own: int | None = None, pattern: str | None = None) -> list[int]:
    """The steps that are older than the ``keep`` newest whole ones, newest first.

    Left out are those in which each rank has metadata of its own, which are no steps of a run, directories without a
    file of a checkpoint of DCP, and links, which lead to what need not be this run's.

    Args:
        own: A step that counts as whole, whether it is there or not, and never goes.
        pattern: How the run names its steps.
    """
    num_whole = 0
    old: list[int] = []
    paths = step_paths(run, pattern)
    for number in sorted({*paths, *([] if own is None else [own])}, reverse=True):
        if num_whole < keep:
            num_whole += number == own or is_whole(paths[number])
        elif number != own and not (path := paths[number]).is_symlink():
            ours, others = checkpoint_names(path)
            if (ours or not others) and not ranks_with_metadata(path):
                old.append(number)
    return old


def remove_step(path: Path) -> None:
    """Out of sight first, so that nobody takes half of it for a checkpoint. Files of others stay, in their place."""
    try:
        lock = SaveLock.acquire(lock_path(path, None), save_id := uuid.uuid4().hex, path)
    except (SaveInProgressError, OSError) as error:
        warnings.warn(f"{path} is kept: {error}", stacklevel=2)
        return
    try:
        ours, others = checkpoint_names(path)
        if others:
            remove_files(path, sorted(ours, key=lambda name: not name.endswith(".metadata")))
        else:
            os.rename(path, stage_path(path, save_id))
            remove_directory(stage_path(path, save_id), None)
    except OSError as error:
        warnings.warn(f"{path} stays: it cannot be removed ({error})", stacklevel=2)
    finally:
        lock.release()


def remove_leftovers(run: Path, pattern: str | None = None) -> None:
    """Removes what dead saves left beside the steps of a run and in them; a step that is being saved is left alone."""
    remove_dead_saves(run)
    for path in step_paths(run, pattern).values():
        if not find_dead_files(path, None):
            continue
        try:
            lock = SaveLock.acquire(lock_path(path, None), uuid.uuid4().hex, path)
        except (SaveInProgressError, OSError) as error:
            warnings.warn(f"{path} is left as it is: {error}", stacklevel=2)
            continue
        try:
            remove_dead_files(path, None)
        finally:
            lock.release()
