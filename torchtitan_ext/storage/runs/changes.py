"""What changes in a run between two looks at it: steps that land or go, saves that end without one. Imports no torch.

A look lists the run, and asks of each step which ``.metadata`` it has. It reads only steps where that has changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path
from torchtitan_ext.storage.commit.branch import index_head
from torchtitan_ext.storage.commit.save_lock import STALE_SECONDS
from torchtitan_ext.storage.commit.steps import step_of, step_paths
from torchtitan_ext.storage.location import Location, Place
from torchtitan_ext.storage.runs.listing import ListedStep, list_step, live_saves
from torchtitan_ext.storage.runs.object_runs import list_object_step
from torchtitan_ext.storage.runs.remote_steps import remote_steps

Kind = Literal["found", "landed", "replaced", "removed", "saving", "silent", "failed"]
"""``found``: there at the first look. ``replaced``: saved again. ``silent``: being saved by a process that has given no
sign of life for ``STALE_SECONDS``. ``failed``: it was being saved, and the save has left no step."""


class Change(NamedTuple):
    """What became of a step. One that is not there has a number alone, and the saver that it had."""

    kind: Kind
    step: ListedStep


class _Sight(NamedTuple):
    """What a look sees: saves under way, by their ids; where each finished step is, and which ``.metadata`` it has."""

    saves: dict[str, Change]
    steps: dict[int, tuple[Place, Hashable]]


class RunWatch:
    """Looks at a run, in a directory or an object store, again and again."""

    def __init__(self, run: Place, pattern: str | None = None) -> None:
        self._run, self._pattern = run, pattern
        self._seen: _Sight | None = None
        self._left_behind: set[int] = set()

    def look(self) -> list[Change]:
        """What has changed since the last look; at the first one the steps that are there.

        Raises:
            OSError: The run cannot be listed, or is not there. The next look may succeed, and misses nothing.
        """
        run, pattern, is_first, old = self._run, self._pattern, self._seen is None, self._seen or _Sight({}, {})
        if isinstance(run, Path) and is_first and not run.exists():
            self._seen = old  # all that comes later lands
        seen = _look_at_files(run, pattern) if isinstance(run, Path) else _look_at_objects(run, pattern)
        changes = []
        for number, found in sorted(seen.steps.items()):
            if old.steps.get(number) != found and (step := _listed(number, found[0])) is not None:
                changes.append(Change("found" if is_first else "replaced" if number in old.steps else "landed", step))
        ended = [(save_id, save.step) for save_id, save in old.saves.items() if save_id not in seen.saves]
        failed = [step for save_id, step in ended if _has_failed(save_id, step.step, seen, changes, pattern)]
        self._left_behind -= {change.step.step for change in changes}
        self._left_behind.update(number for change in changes for number in change.step.left_behind)
        gone = sorted(old.steps.keys() - seen.steps.keys() - self._left_behind)
        changes += [Change("removed", _absent(number)) for number in gone]
        changes += [Change("failed", step) for step in failed]
        changes += [one for key, one in seen.saves.items() if one.kind == "silent" and old.saves.get(key) != one]
        self._seen = seen
        return changes


def _absent(number: int, saver: str | None = None) -> ListedStep:
    return ListedStep(number, "saving" if saver else "not finished", None, 0, None, None, saver)


def _look_at_files(run: Path, pattern: str | None) -> _Sight:
    os.listdir(run)  # raises where there is none
    seen = _Sight({}, {})
    # Locks first: a save that has let go of its lock has committed before.
    for number, state in live_saves(run, pattern).items():
        if state.owner is not None:
            is_silent = abs(time.time() - state.touched) > STALE_SECONDS
            save = Change("silent" if is_silent else "saving", _absent(number, str(state.owner)))
            seen.saves[state.owner.save_id] = save
    for number, path in step_paths(run, pattern).items():
        for place in (index_path(path, None), metadata_path(path, None)):
            with suppress(FileNotFoundError):
                found = place.stat()
                seen.steps[number] = path, (found.st_ino, found.st_mtime_ns, found.st_size)
    return seen


def _look_at_objects(run: Location, pattern: str | None) -> _Sight:
    finished, unfinished, marks = remote_steps(str(run), pattern)
    listed = [list_object_step(number, Location(url)) for number, url in unfinished.items()]
    saves = {str(step.step): Change("saving", step) for step in listed if step is not None and step.saver}
    return _Sight(saves, {number: (Location(url), marks[number]) for number, url in finished.items()})


def _listed(number: int, path: Place) -> ListedStep | None:
    """A finished step; ``None`` where it has been removed since."""
    with suppress(FileNotFoundError):
        return list_object_step(number, path) if isinstance(path, Location) else list_step(path, number)
    return None


def _has_failed(save_id: str, number: int, seen: _Sight, landed: list[Change], pattern: str | None) -> bool:
    """Whether a save that has ended left no step. A step may be gone before it was looked at: then the newer ones that
    landed go on from it, or from one between."""
    path = seen.steps[number][0] if number in seen.steps else None
    head = index_head(path) if isinstance(path, Path) else None
    if isinstance(path, Location) or (head is not None and head.save_id.hex() == save_id):
        return False
    parents = [step_of(one.step.parent or "", pattern) for one in landed if one.step.step > number]
    return all(parent is not None and parent < number for parent in parents)
