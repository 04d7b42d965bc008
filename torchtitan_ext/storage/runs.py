"""The checkpoints of a run: the latest, and which of them stay."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.commit import lock_path
from torchtitan_ext.storage.leftovers import (
    checkpoint_names,
    find_dead_files,
    remove_dead_files,
    remove_dead_saves,
    remove_directory,
    remove_files,
    stage_path,
)
from torchtitan_ext.storage.save_lock import SaveLock
from torchtitan_ext.storage.saved_metadata import ranks_with_metadata
from torchtitan_ext.storage.steps import find_steps, last_finished, step_of, step_path
from torchtitan_ext.storage.verify import is_whole


def latest(run_dir: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of the highest step in a run whose save has finished; ``None`` where there is none. Not
    collective, and reads no checkpoint: ``tte.load(..., step="last-good")`` does."""
    number = last_finished(find_steps(Path(run_dir)))
    return None if number is None else step_path(Path(run_dir), number)


def remove_old_steps(saved: Path, keep: int) -> None:
    """Removes what is older than the ``keep`` newest whole checkpoints of a run; never the one that was just saved.

    A checkpoint that is not whole does not count as one of them, so a good one behind it stays. What cannot be removed
    stays, with a warning.
    """
    for path in old_steps(saved, keep):
        remove_step(path)


def old_steps(saved: Path, keep: int) -> list[Path]:
    """What is older than the ``keep`` newest whole checkpoints of a run; never the one that was just saved.

    That one counts as whole. So does one that is being saved: with a ``keep`` of 2 or more a whole one stays where its
    save fails.
    """
    run, own = Path(os.path.abspath(saved)).parent, step_of(saved)
    try:
        return [step_path(run, number) for number in steps_beyond(run, keep, own)]
    except OSError as error:
        warnings.warn(f"old steps of {run} stay: they cannot be listed ({error})", stacklevel=2)
        return []


def steps_beyond(run: Path, keep: int, own: int | None = None) -> list[int]:
    """The steps that are older than the ``keep`` newest whole ones, newest first.

    Left out are those in which each rank has metadata of its own, which are no steps of a run, directories without a
    file of a checkpoint of DCP, and links, which lead to what need not be this run's.

    Args:
        own: A step that counts as whole, whether it is there or not, and never goes.
    """
    num_whole = 0
    old: list[int] = []
    for number in sorted({*find_steps(run), *([] if own is None else [own])}, reverse=True):
        path = step_path(run, number)
        if num_whole < keep:
            num_whole += number == own or is_whole(path)
        elif number != own and not path.is_symlink():
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


def remove_leftovers(run: Path) -> None:
    """Removes what dead saves left beside the steps of a run and in them; a step that is being saved is left alone."""
    remove_dead_saves(run)
    for number in find_steps(run):
        path = step_path(run, number)
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
