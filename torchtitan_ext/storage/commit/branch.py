"""Branches of a run: a run that is set back goes on below steps that it leaves behind.

A run has steps 10, 20 and 30, is loaded at step 10 and saves step 11. With that commit 20 and 30 are *abandoned*:

    run/step-10
    run/step-11                             its index says: parent 10, abandoned 20 and 30
    run/abandoned/11-3f2a9c1b/step-20       one rename each, after the commit
    run/abandoned/11-3f2a9c1b/step-30

The record in the index decides, not the place: after a kill between the commit and a rename, or where a step cannot be
moved, readers pass over the abandoned step, and the next save below it moves it. An abandoned step is known by its
number and the digest of its ``.metadata``, so another save of the same number is not taken for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import SaveInProgressError, named, warn
from torchtitan_ext.storage.checkpoint_files import NO_METADATA, metadata_path, shown, sync_directory
from torchtitan_ext.storage.commit.commit import lock_path
from torchtitan_ext.storage.commit.save_lock import SaveLock
from torchtitan_ext.storage.commit.steps import has_finished, own_pattern, step_of, step_paths
from torchtitan_ext.storage.location import Place

ABANDONED = "abandoned"
"""The directory of a run for steps that were set aside. Trainers find no ``step-<number>`` in this name."""

HEAD_BYTES = 1 << 16
"""The head of an index has the notes of the save: a few hundred bytes, and 20 for each step that it leaves behind."""

# The step of each run that this process has loaded or saved last, by the run's directory: a save of the same step again
# leaves nothing behind. Nothing else knows it: a load and a save have only the path in common.
_last_names: dict[str, str] = {}


class LeftStep(NamedTuple):
    """A step that a save leaves behind."""

    number: int
    identity: str
    path: Path


class PlaceInRun(NamedTuple):
    """The place of a save in its run.

    Attributes:
        number: Its own step.
        parent: The step that it goes on from: the last that this process loaded or saved, else the newest below.
        newer: The steps above, newest first.
    """

    number: int
    parent: Path | None
    newer: tuple[LeftStep, ...]


def remember_step(path: Path) -> None:
    """Notes that this process has loaded or saved this step of a run."""
    real = Path(os.path.realpath(path))
    _last_names[str(real.parent)] = real.name


def last_name(path: Place) -> str | None:
    """The name of the step that this process has loaded or saved last in the run of this one."""
    return _last_names.get(os.path.dirname(os.path.realpath(path)))


def place_in_run(target: Path, pattern: str | None, last: str | None, beside: Sequence[Path] = ()) -> PlaceInRun | None:
    """The place of a save; ``None`` if the target's name is no step.

    Args:
        last: What ``last_name`` says where the save was called.
        beside: Other directories with steps of the same run.
    """
    pattern = own_pattern(target, pattern)
    own, known = step_of(target, pattern), None if last is None else step_of(target.parent / last, pattern)
    if own is None:
        return None
    steps = finished_steps([target.parent, *beside], pattern)
    below = [path for number, path in steps if number < own and path.parent == target.parent]
    parent = next((path for path in below if path.name == last), below[-1] if below else None)
    if known is not None and known >= own and has_finished(target):
        return PlaceInRun(own, parent, ())
    newer = [LeftStep(number, identity_of_step(path), path) for number, path in steps if number > own]
    return PlaceInRun(own, parent, tuple(reversed(newer)))


def notes_of_place(place: PlaceInRun | None) -> list[tuple[str, str]]:
    """The notes of a save's index about its place in the run."""
    notes = []
    if place is not None and place.parent is not None:
        head = index_head(place.parent)
        notes.append(("parent", f"{place.parent.name} {'-' if head is None else head.save_id.hex()}"))
    if place is not None and place.newer:
        notes.append((ABANDONED, " ".join(f"{step.number}:{step.identity}" for step in place.newer)))
    return notes


def finished_steps(runs: Iterable[Path], pattern: str | None) -> list[tuple[int, Path]]:
    """The finished steps in the directories of a run, by their numbers."""
    found = [item for run in runs for item in step_paths(run, pattern).items() if has_finished(item[1])]
    return sorted(found, key=lambda item: item[0])


def abandoned_steps(steps: Iterable[tuple[int, Path]]) -> set[Path]:
    """Which of the finished steps of a run others of them have left behind. Reads the head of each index."""
    marks: set[str] = set()
    abandoned: set[Path] = set()
    for number, path in sorted(steps, key=lambda item: item[0]):
        if any(mark.startswith(f"{number}:") for mark in marks) and f"{number}:{identity_of_step(path)}" in marks:
            abandoned.add(path)
        elif (head := index_head(path)) is not None:
            marks.update(head.notes.get(ABANDONED, "").split())
    return abandoned


def living_steps(runs: Iterable[Path], pattern: str | None) -> list[tuple[int, Path]]:
    """Those of ``finished_steps`` that the run has not left behind, in their order."""
    steps = finished_steps(runs, pattern)
    abandoned = abandoned_steps(steps)
    return [(number, path) for number, path in steps if path not in abandoned]


def latest_path(run: Path, pattern: str | None = None) -> Path | None:
    """The newest finished step of the branch of a run's last commit; ``None`` without one."""
    return next((path for _, path in reversed(living_steps([run], pattern))), None)


def index_head(step: Path) -> _core.Index | None:
    """The head of the index of a step, without files; ``None`` if it has none that belongs to its ``.metadata``."""
    try:
        metadata = metadata_path(step, None)
        num_bytes = metadata.stat().st_size if metadata.is_file() else NO_METADATA
        for name in sorted(name for name in os.listdir(step) if name.startswith(".tte_index")):
            head = _parsed_head(step / name)
            if head is not None and head.metadata_bytes == num_bytes:
                return head
    except OSError:
        pass
    return None


def identity_of_step(step: Path) -> str:
    """Which save of this number a finished step is: the digest of its ``.metadata``, also stock's."""
    head = index_head(step)
    if head is not None:
        return head.save_id.hex() if head.metadata_bytes == NO_METADATA else f"{head.metadata_digest:016x}"
    try:
        return f"{_core.digest(metadata_path(step, None).read_bytes()):016x}"
    except OSError:
        return "-"


def set_aside(place: PlaceInRun, save_id: str, *, sync: bool) -> None:
    """Moves the steps that a committed save has left behind, newest first, each by one rename. Says so by a warning.

    What cannot be moved stays, and is passed over by readers. The new directory can be listed and loaded from as a run.
    """
    moved: dict[Path, Path] = {}
    for step in place.newer:
        run = step.path.parent
        folder = run / ABANDONED / f"{place.number}-{save_id[:8]}"
        with locked(step.path, save_id) as has_lock:
            # A link may lead to another run. Another process may have saved the step since.
            if not has_lock or step.path.is_symlink() or identity_of_step(step.path) != step.identity:
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                os.rename(step.path, folder / step.path.name)
                moved[run] = folder
            except OSError as error:
                warn(f"{step.path} stays, and loads pass over it: it cannot be moved ({error})")
    for run, folder in moved.items() if sync else ():
        for directory in (folder, folder.parent, run):
            sync_directory(directory)
    numbers = named([step.number for step in reversed(place.newer)])
    where = f"set aside in {' and '.join(map(str, moved.values()))}" if moved else "passed over by loads"
    warn(
        f"save: the run goes on with step {place.number}, below its step(s) {numbers}: these are abandoned, and {where}"
        "; torchtitan-ext gc RUN --abandoned --yes removes them"
    )


def branches_aside(run: Path) -> list[Path]:
    """The directories of a run that have steps which were set aside, one for each time it was set back."""
    folder = run / ABANDONED
    if not folder.is_dir() or folder.is_symlink():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def steps_aside(run: Path) -> list[Path]:
    """The steps of a run that were set aside."""
    steps = [step for folder in branches_aside(run) for step in sorted(folder.iterdir())]
    return [step for step in steps if step.is_dir() and not step.name.startswith(".")]


@contextmanager
def locked(path: Path, save_id: str) -> Iterator[bool]:
    """Holds the lock of a checkpoint; yields false, after a warning, if that cannot be had."""
    try:
        lock = SaveLock.acquire(lock_path(path), save_id, path)
    except (SaveInProgressError, OSError) as error:
        warn(f"{path} is kept: {error}")
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _parsed_head(path: Path) -> _core.Index | None:
    with path.open("rb") as stream:
        content = stream.read(HEAD_BYTES)
        for more in (False, True):  # a save that leaves thousands of steps behind has more notes
            try:
                return _core.parse_index_head(content + (stream.read() if more else b""), shown(path))
            except ValueError:
                continue
    return None
