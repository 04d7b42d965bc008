"""How a save becomes the checkpoint at its place: by one rename; before it the old one is whole, after it the new.

Staged, where the target is absent, empty or holds only files of a checkpoint: all files go into a hidden directory
beside the target, which then takes its name, or changes places with the checkpoint that is there (RENAME_EXCHANGE).

In place, where the target holds files of others, or directories cannot change places (NFS, FUSE, Lustre), or each rank
has metadata of its own: files named by the save's id beside those that are there; the rename of ``.metadata`` commits.

With ``sync`` everything is on the disk before that rename, and it is before anything that it replaced is removed.
The coordinator calls ``begin_save`` and then ``commit`` or ``abandon``; the others learn from the lock file, by
``find_place``, where to write.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointFailedError, only_printed
from torchtitan_ext.storage.checkpoint_files import DATA_SUFFIX, index_path, metadata_path, sync_directory, write_file
from torchtitan_ext.storage.commit.leftovers import (
    LOCK_PREFIX,
    PROBES,
    checkpoint_names,
    of_rank,
    remove_dead_files,
    remove_dead_saves,
    remove_directory,
    remove_files,
    remove_replaced,
    same_attributes,
    save_id_of,
    stage_path,
)
from torchtitan_ext.storage.commit.save_lock import SaveLock, read_lock, remove_dead_lock

# The lock of a shared directory is there before any rank looks for it; some network file systems show it later.
_SHOWN_SECONDS = 10.0

_LOCK_OF_RANK = re.compile(r"__\d+\.tte_save")

NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class SavePlace:
    """Where the ranks of one save write."""

    save_id: str
    target: Path
    is_staged: bool

    @property
    def directory(self) -> Path:
        return stage_path(self.target, self.save_id) if self.is_staged else self.target

    def data_name(self, prefix: str) -> str:
        return f"{prefix}{'0' if self.is_staged else self.save_id}{DATA_SUFFIX}"


class RunningSave:
    """A save that holds the lock of its target. For the rank that commits; not collective.

    Args:
        rank: Whose metadata it is, where each rank has its own.
        new_parents: Directories that got a new one in them.
    """

    def __init__(self, lock: SaveLock, place: SavePlace, rank: int | None, new_parents: Sequence[Path]) -> None:
        self.place = place
        self._lock = lock
        self._rank = rank
        self._new_parents = new_parents
        self._may_be_committed = False

    def check_names(self, names: Sequence[str]) -> None:
        """Raises CheckpointFailedError where a rank wrote under the names of another save: it saw an older lock."""
        marks = {name for name in names if save_id_of(name) != (None if self.place.is_staged else self.place.save_id)}
        if marks:
            text = f"{', '.join(sorted(marks))} belong to another save: the file system showed these ranks an old lock"
            raise CheckpointFailedError("save", {0: text})

    def commit(
        self, index: bytes, metadata: bytes | None, *, sync: bool, confirm: Callable[[], None] = lambda: None
    ) -> Path:
        """Makes what all ranks have written the checkpoint, and removes what it replaces.

        Args:
            metadata: ``None`` where the index stands for it; not in place.
            confirm: Called right before the rename; what it raises is raised, and nothing is committed.

        Returns:
            Where the metadata lies now, or the index that stands for it.

        Raises:
            SaveInProgressError: Another save took this one for dead. What is at the target is whole.
            OSError: The rename has not taken effect, or the disk does not say whether it has: then no file is removed.
            BaseException: What a signal handler raised during the rename. If that took effect, the save has succeeded,
                and is finished first.
        """
        directory, target = self.place.directory, self.place.target
        path = metadata_path(target, self._rank)
        rename: Callable[[], None]
        if self.place.is_staged:
            written, final, content = index_path(directory, None), index_path(target, None), index
            write_file(written, index, sync=sync)
            if metadata is not None:
                write_file(metadata_path(directory, None), metadata, sync=sync)
            rename = partial(_take_name, directory, target)
        else:
            assert metadata is not None, "a save in place commits by its .metadata, please report"
            written, final, content = path.with_name(f"{path.name}.tmp"), path, metadata
            write_file(index_path(target, self._rank, self.place.save_id), index, sync=sync)
            write_file(written, metadata, sync=sync)
            rename = partial(os.rename, written, final)
        if sync:
            sync_directory(directory)
        confirm()
        self._lock.check()
        raised = self._rename(rename, written, final, content)
        try:
            self._finish(sync)
        finally:
            if raised is not None:
                raise raised
        return final if metadata is None else path

    def abandon(self) -> None:
        """Removes what was written; for a save that has failed on all ranks. The target stays as it was. After the
        rename, and in doubt of it, nothing is removed: what is there may be all that there is, or, until it is synced,
        what it replaced."""
        if not self._may_be_committed and self.place.is_staged:
            remove_directory(self.place.directory, None)
        elif not self._may_be_committed:
            names = of_rank(os.listdir(self.place.target), self._rank)
            remove_files(self.place.target, [name for name in names if save_id_of(name) == self.place.save_id])
        self._lock.release()

    def _rename(self, rename: Callable[[], None], written: Path, final: Path, content: bytes) -> BaseException | None:
        """Renames, which makes a file of this content lie at ``final``, and no longer at ``written``.

        If the call raises, these files say whether it took effect: a network file system may answer late with an
        error, and a signal handler may raise right behind the call.

        Returns:
            What a signal handler raised although the rename took effect.
        """
        self._may_be_committed = True
        try:
            rename()
        except BaseException as error:
            if not _holds(final, content):
                self._may_be_committed = not _holds(written, content)
                raise
            # An error of the call has a number; what a handler raises, such as a TimeoutError, has none.
            return None if isinstance(error, OSError) and error.errno is not None else error
        return None

    def _finish(self, sync: bool) -> None:
        """What follows the rename: its sync, and the removal of what it replaced."""
        directory, target = self.place.directory, self.place.target
        if sync:
            for parent in dict.fromkeys([target.parent if self.place.is_staged else target, *self._new_parents]):
                sync_directory(parent)
        with only_printed():
            if self.place.is_staged:
                remove_directory(directory, target)
            else:
                remove_replaced(target, self.place.save_id, self._rank)
        self._lock.release()


def begin_save(path: Path, save_id: str, rank: int | None) -> RunningSave:
    """Takes the lock of a target, removes what dead saves left there, and makes room for a new one.

    Args:
        rank: Whose metadata it is, where each rank has its own.

    Raises:
        SaveInProgressError: Another save is under way there.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "save: got a file, expected a directory", str(target))
    new_parents = _make_directories(target.parent)
    lock_file = lock_path(target, rank)
    if lock_file.parent == target:
        new_parents += _make_directories(target)
    lock = SaveLock.acquire(lock_file, save_id, target)
    try:
        for other in _excluded_locks(target, rank):
            if other != lock_file:
                remove_dead_lock(other)
        if lock_file.parent != target:
            remove_dead_saves(target.parent, lock_file)
        if target.exists():
            remove_dead_files(target, rank)
        is_staged = lock_file.parent != target and _make_stage(target, save_id)
        if not is_staged:
            new_parents += _make_directories(target)
        lock.add_line(json.dumps({"is_staged": is_staged}))
    except BaseException:
        lock.release()
        raise
    return RunningSave(lock, SavePlace(save_id, target, is_staged), rank, new_parents)


def find_place(path: Path, rank: int, *, is_own: bool) -> SavePlace:
    """Where this rank is to write, as the coordinator's ``begin_save`` has decided. For every rank.

    Args:
        is_own: Whether each rank has metadata of its own.

    Raises:
        RuntimeError: This rank does not see the lock: the file system is not shared.
    """
    target = Path(os.path.realpath(path))
    lock_files = [target / lock_name(rank)] if is_own else [lock_beside(target), target / lock_name(None)]
    deadline = time.monotonic() + _SHOWN_SECONDS
    while True:
        for lock_file in lock_files:
            state = read_lock(lock_file)
            if state is not None and state.owner is not None and state.lines:
                return SavePlace(state.owner.save_id, target, json.loads(state.lines[0])["is_staged"])
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{path} is not in a shared directory: rank {rank} does not see what the coordinator wrote there; "
                "save to a file system that all ranks have"
            )
        time.sleep(0.05)


def lock_path(target: Path, rank: int | None) -> Path:
    """Beside the target, which may be replaced as a whole; in it where there is no room beside it."""
    has_room = os.access(target.parent, os.W_OK | os.X_OK) and not _is_mounted(target)
    return lock_beside(target) if rank is None and has_room else target / lock_name(rank)


def lock_beside(target: Path) -> Path:
    """The lock of a target that may be replaced as a whole."""
    return target.parent / f"{LOCK_PREFIX}{_core.digest(os.fsencode(target.name)):016x}"


def lock_name(rank: int | None) -> str:
    """The lock of a target, in it."""
    return ".tte_save" if rank is None else f"__{rank}.tte_save"


def _excluded_locks(target: Path, rank: int | None) -> list[Path]:
    """Locks under which nobody may save meanwhile: both of all ranks together, as the place may have been mounted for
    an earlier job, and for such a save those of single ranks."""
    names = os.listdir(target) if rank is None and target.exists() else []
    of_ranks = [target / name for name in names if _LOCK_OF_RANK.fullmatch(name)]
    return [lock_beside(target), target / lock_name(None), *of_ranks]


def _is_mounted(target: Path) -> bool:
    """Whether a file system, or a directory of the same one, is mounted there: such a place cannot be renamed."""
    if os.path.ismount(target):
        return True
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        places = {line.split()[4] for line in stream}
    return str(target).replace("\\", "\\134").replace(" ", "\\040") in places


def _take_name(stage: Path, target: Path) -> None:
    """Gives a directory the name of another, which changes places with it if there is anything in it."""
    try:
        os.rename(stage, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _core.exchange_paths(os.fsencode(stage), os.fsencode(target))


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file can be read, and has this content."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _make_stage(target: Path, save_id: str) -> bool:
    """Makes the directory that is to take the target's place; says whether that can be."""
    if _core.is_on_fuse(os.fsencode(target.parent)):
        return False
    exists = target.exists()
    ours, others = checkpoint_names(target) if exists else ([], [])
    # A process whose directory is replaced would stand in one that is gone.
    if others or (exists and os.path.samefile(target, os.curdir)):
        return False
    stage = stage_path(target, save_id)
    stage.mkdir()
    if exists:
        stage.chmod(target.stat().st_mode & 0o7777)
        if not same_attributes(stage, target) or (ours and not _can_exchange(stage)):
            stage.rmdir()
            return False
    return True


def _can_exchange(directory: Path) -> bool:
    """Whether directories can change places on a file system; tried with two new ones."""
    pair = [directory / name for name in PROBES]
    for path in pair:
        path.mkdir()
    try:
        _core.exchange_paths(os.fsencode(pair[0]), os.fsencode(pair[1]))
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return False
    finally:
        for path in pair:
            path.rmdir()
    return True


def _make_directories(path: Path) -> list[Path]:
    """Makes a directory and those that it is in; returns where each new one lies."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return [directory.parent for directory in missing]
