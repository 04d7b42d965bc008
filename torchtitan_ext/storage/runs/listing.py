"""Lists the directory of a run: its steps, the saves that run now, and leftovers of dead saves. Imports no torch."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import UnknownFormatError
from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path, sharing_save
from torchtitan_ext.storage.commit.branch import ABANDONED, abandoned_steps, index_head, steps_aside
from torchtitan_ext.storage.commit.commit import LOCK_NAME, lock_beside
from torchtitan_ext.storage.commit.leftovers import LOCK_PREFIX, checkpoint_names, find_dead_files, find_dead_saves
from torchtitan_ext.storage.commit.save_lock import LockState, is_surely_dead, read_lock
from torchtitan_ext.storage.commit.steps import has_finished, step_of, step_paths
from torchtitan_ext.storage.formats.detect import Format, checkpoints_in, format_of

StepState = Literal["finished", "saving", "not finished", "folder", "other", "abandoned"]
"""``abandoned``: the run was set back and has left it behind. ``folder``: a directory with checkpoints in it.
``other``: made by no save of DCP, for example an export to safetensors."""


class ListedStep(NamedTuple):
    """One step of a run.

    Attributes:
        num_bytes: Size of all files in the directory and in the checkpoints below it.
        finished_at: Time of the commit in seconds since 1970; ``None`` before it.
        world_size: Number of ranks that saved, from the index; ``None`` without an index.
        saver: Process, host and start of a save that runs there now, perhaps over a finished checkpoint.
        checkpoints: The names of the checkpoints in a folder.
        parent: The name of the step that the save went on from, from the index.
        left_behind: The newer steps that it left behind, because the run was set back.
        reused_bytes: Size of the files that it shares with earlier steps.
        seconds: Of each phase until the index was written, on the coordinator.
    """

    step: int
    state: StepState
    format: Format | None
    num_bytes: int
    finished_at: float | None
    world_size: int | None
    saver: str | None
    checkpoints: tuple[str, ...] = ()
    parent: str | None = None
    left_behind: tuple[int, ...] = ()
    reused_bytes: int = 0
    seconds: Mapping[str, float] = {}


class Leftover(NamedTuple):
    """A file or directory that a dead save left."""

    path: Path
    num_bytes: int


def list_steps(run: Path, pattern: str | None = None) -> list[ListedStep]:
    """The steps of a run, oldest first; also those whose save runs and has no directory yet.

    Args:
        pattern: How the run names its steps; see ``storage/commit/steps.py``.

    Raises:
        OSError: The run's directory cannot be read.
    """
    os.listdir(run)
    savers = {number: str(state.owner) for number, state in _live_saves(run, pattern).items()}
    paths = step_paths(run, pattern)
    abandoned = abandoned_steps(item for item in paths.items() if has_finished(item[1]))
    steps = [
        _list_step(path, number, savers.pop(number, None), is_abandoned=path in abandoned)
        for number, path in paths.items()
    ]
    steps += [ListedStep(number, "saving", None, 0, None, None, saver) for number, saver in savers.items()]
    return sorted(steps)


def list_aside(run: Path) -> list[Leftover]:
    """The steps that a run has left behind: those set aside, and with their sizes."""
    return [Leftover(path, bytes_in(path)) for path in steps_aside(run)]


def find_leftovers(run: Path, pattern: str | None = None) -> list[Leftover]:
    """Leftovers of dead saves beside the steps and in them."""
    stages, locks = find_dead_saves(run)
    paths = [path for path, _ in stages] + locks
    for step in step_paths(run, pattern).values():
        if _saver_of(step) is None:
            paths += [step / name for name in find_dead_files(step)]
    return [Leftover(path, bytes_in(path)) for path in sorted(paths)]


def bytes_in(path: Path, names: list[str] | None = None) -> int:
    """The size of a file, or of the files in a directory (all, or those with these names)."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum(size for name, size in _sizes_in(path).items() if names is None or name in names)


def _sizes_in(path: Path) -> dict[str, int]:
    with os.scandir(path) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}


def checkpoint_bytes(step: Path) -> int:
    """The size of a step's checkpoint files."""
    return bytes_in(step, checkpoint_names(step)[0])


def disk_bytes(paths: Iterable[Path]) -> int:
    """The size of the files in some directories on the disk: a file that several checkpoints share counts once."""
    files = [entry.stat() for path in paths for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)]
    return sum({(status.st_dev, status.st_ino): status.st_size for status in files}.values())


def freed_bytes(steps: Iterable[Path], leftovers: Iterable[Leftover]) -> int:
    """What the removal of these checkpoints and leftovers frees: not files that other checkpoints share."""
    files = [step / name for step in steps for name in checkpoint_names(step)[0]]
    for path, _ in leftovers:
        files += [Path(entry) for entry in os.scandir(path)] if path.is_dir() else [path]
    found = [status for status in map(Path.lstat, files) if not stat.S_ISDIR(status.st_mode)]
    removed = Counter((status.st_dev, status.st_ino) for status in found)
    sizes = {
        (status.st_dev, status.st_ino): status.st_size
        for status in found
        if removed[status.st_dev, status.st_ino] == status.st_nlink
    }
    return sum(sizes.values())


def _list_step(path: Path, number: int, saver: str | None, *, is_abandoned: bool) -> ListedStep:
    """One of ``list_steps``."""
    saver, is_finished = saver or _saver_of(path), has_finished(path)
    found: Format | None = None
    try:
        found = format_of(path)
    except UnknownFormatError:
        pass
    inner = () if found is not None else tuple(checkpoints_in(path))
    state: StepState = "finished" if is_finished else "saving" if saver else "folder" if inner else "not finished"
    if found == "safetensors" or (found == "dcp" and not is_finished):
        state = "other"
    elif is_abandoned:
        state = "abandoned"
    places = [place for place in (metadata_path(path, None), index_path(path, None)) if place.is_file()]
    finished_at = places[0].stat().st_mtime if is_finished else None
    head = index_head(path)
    num_bytes = bytes_in(path) + sum(bytes_in(path / name) for name in inner)
    listed = ListedStep(number, state, found, num_bytes, finished_at, None, saver, inner)
    return with_notes(listed, head, _sizes_in(path))


def with_notes(step: ListedStep, head: _core.Index | None, files: Mapping[str, int]) -> ListedStep:
    """The step with what its index notes of the save, beside these files with their sizes."""
    if head is None:
        return step
    notes, own = head.notes, (None, head.save_id.hex())
    size, phases = notes.get("world_size", ""), re.findall(r"(\S+) (\d{5,9}\.\d{3})", notes.get("seconds", ""))
    left = re.findall(r"(?:^| )(\d{1,18}):", notes.get(ABANDONED, ""))
    return step._replace(
        world_size=int(size) if size.isdecimal() else None,
        parent=notes.get("parent", "").partition(" ")[0] or None,
        left_behind=tuple(sorted(map(int, left))),
        reused_bytes=sum(files[name] for name in files if sharing_save(name) not in own),
        seconds={phase: float(seconds) for phase, seconds in phases},
    )


def _live_saves(run: Path, pattern: str | None) -> dict[int, LockState]:
    """The running saves by step, from the locks beside the steps, which name their owners."""
    saves = {}
    for name in os.listdir(run):
        state = _live_state(run / name) if name.startswith(LOCK_PREFIX) else None
        step = None if state is None or state.owner is None else step_of(state.owner.path, pattern)
        if state is not None and step is not None:
            saves[step] = state
    return saves


def _saver_of(step: Path) -> str | None:
    """The save that runs at a step; ``None`` without one, as far as that is known without waiting."""
    target = Path(os.path.realpath(step))
    states = [state for lock in (lock_beside(target), target / LOCK_NAME) if (state := _live_state(lock))]
    return str(states[0].owner or "another process") if states else None


def _live_state(lock: Path) -> LockState | None:
    """The state of a lock; ``None`` if there is none or it is surely dead."""
    try:
        state = read_lock(lock)
    except PermissionError:  # a lock of another user
        return LockState(None, [], 0, 0.0)
    return None if state is None or is_surely_dead(state) else state
