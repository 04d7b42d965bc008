"""The checkpoints of a run: the latest, and which of them stay."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.commit import lock_path
from torchtitan_ext.storage.leftovers import checkpoint_names, remove_directory, remove_files, stage_path
from torchtitan_ext.storage.save_lock import SaveLock
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
        _remove_step(path)


def old_steps(saved: Path, keep: int) -> list[Path]:
    """What is older than the ``keep`` newest whole checkpoints of a run, one that was just saved, or is being saved,
    counted as whole; never that one."""
    run, own = Path(os.path.abspath(saved)).parent, step_of(saved)
    try:
        newest = sorted({*find_steps(run), *([] if own is None else [own])}, reverse=True)
    except OSError as error:
        warnings.warn(f"old steps of {run} stay: they cannot be listed ({error})", stacklevel=2)
        return []
    num_whole, old = 0, []
    for number in newest:
        if num_whole < keep:
            num_whole += number == own or is_whole(step_path(run, number))
        elif number != own:
            old.append(step_path(run, number))
    return old


def _remove_step(path: Path) -> None:
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
