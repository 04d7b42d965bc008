"""Commits a save by one rename: a reader sees the old or the new checkpoint, never a mix.

Staged save: all files go into a hidden directory beside the target, which then takes the target's name or changes
places with it (RENAME_EXCHANGE). Used if the target is absent, empty, or holds only files of a checkpoint.

Save in place: the new files lie beside the old ones under names with the save's id, and the rename of ``.metadata``
commits. Used if the target holds foreign files, or if its file system cannot exchange directories (NFS, FUSE, Lustre).

With ``sync`` all files are on the disk before the rename, and the rename is before an old file is removed.
The coordinator calls ``begin_save``, then ``commit`` or ``abandon``. The other ranks call ``find_place``, which reads
from the lock file where to write.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan_ext import __version__, _core, clock
from torchtitan_ext.errors import CheckpointFailedError, only_printed
from torchtitan_ext.storage.checkpoint_files import (
    data_name,
    index_path,
    metadata_path,
    safetensors_paths,
    sync_directory,
    write_file,
)
from torchtitan_ext.storage.commit.leftovers import (
    LOCK_PREFIX,
    PROBES,
    checkpoint_names,
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
from torchtitan_ext.storage.location import Place

# The coordinator makes the lock before any rank looks for it; some network file systems show it later.
_SHOWN_SECONDS = 10.0

LOCK_NAME = ".tte_save"
"""The name of a lock in its target."""

_LOCK_OF_RANK = re.compile(r"__\d+\.tte_save")

NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class SavePlace:
    """Where the ranks of one save write.

    Attributes:
        is_staged: Whether all files go into a directory that then takes the target's name.
        is_named_by_id: Whether the names of rank files have the save id. Else they are stock's, which a save in place
            cannot use: files of two saves lie beside each other.
    """

    save_id: str
    target: Path
    is_staged: bool
    is_named_by_id: bool

    @property
    def directory(self) -> Path:
        return stage_path(self.target, self.save_id) if self.is_staged else self.target

    def data_name(self, prefix: str) -> str:
        return data_name(prefix, self.save_id if self.is_named_by_id else "0")


class RunningSave:
    """A save that holds the lock of its target. Only the rank that commits has one; not collective.

    Args:
        new_parents: Directories in which the save made a directory.
    """

    def __init__(self, lock: SaveLock, place: SavePlace, new_parents: Sequence[Path]) -> None:
        self.place = place
        self._lock = lock
        self._new_parents = new_parents
        self._may_be_committed = False

    def check_names(self, names: Sequence[str]) -> None:
        """Raises CheckpointFailedError if a rank wrote under the names of another save, because it saw an old lock."""
        expected = self.place.save_id if self.place.is_named_by_id else None
        marks = {name for name in names if save_id_of(name) != expected}
        if marks:
            text = f"{', '.join(sorted(marks))} belong to another save: the file system showed these ranks an old lock"
            raise CheckpointFailedError("save", {0: text})

    def commit(self, index: bytes, metadata: bytes, *, sync: bool, confirm: Callable[[], None] = lambda: None) -> Path:
        """Makes the files of all ranks the checkpoint, and removes the files that they replace.

        Args:
            metadata: Bytes of ``.metadata``.
            confirm: Called right before the rename. If it raises, nothing is committed.

        Returns:
            The path of ``.metadata``.

        Raises:
            SaveInProgressError: Another save took this one for dead. The checkpoint at the target is whole.
            OSError: The rename failed, or the disk does not show whether it did: then no file is removed.
            BaseException: A signal handler raised during the rename. If the rename took effect, the save is finished
                first.
        """
        directory, target = self.place.directory, self.place.target
        path = metadata_path(target, None)
        rename: Callable[[], None]
        if self.place.is_staged:
            written, final, content = index_path(directory, None), index_path(target, None), index
            write_file(written, index, sync=sync)
            write_file(metadata_path(directory, None), metadata, sync=sync)
            rename = partial(_take_name, directory, target)
        else:
            written, final, content = path.with_name(f"{path.name}.tmp"), path, metadata
            write_file(index_path(target, None, self.place.save_id), index, sync=sync)
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
        return path

    def abandon(self) -> None:
        """Removes the files of a save that has failed on all ranks; the target stays as it was. If the rename may have
        taken effect, no file is removed: the new or the replaced files may be the only checkpoint."""
        try:
            if not self._may_be_committed and self.place.is_staged:
                remove_directory(self.place.directory, None)
            elif not self._may_be_committed:
                names = os.listdir(self.place.target)
                remove_files(self.place.target, [name for name in names if save_id_of(name) == self.place.save_id])
        finally:
            self._lock.release()

    def _rename(self, rename: Callable[[], None], written: Path, final: Path, content: bytes) -> BaseException | None:
        """Renames, which moves a file with this content from ``written`` to ``final``.

        If the call raises, these two files show whether it took effect: a network file system may report an error
        late, and a signal handler may raise right after the call.

        Returns:
            The exception of a signal handler if the rename took effect all the same.
        """
        self._may_be_committed = True
        try:
            rename()
        except BaseException as error:
            if not _holds(final, content):
                self._may_be_committed = not _holds(written, content)
                raise
            # An error of the call has a number; an exception of a handler, such as a TimeoutError, has none.
            return None if isinstance(error, OSError) and error.errno is not None else error
        return None

    def _finish(self, sync: bool) -> None:
        """Syncs the rename, and removes the files that it replaced."""
        directory, target = self.place.directory, self.place.target
        if sync:
            for parent in dict.fromkeys([target.parent if self.place.is_staged else target, *self._new_parents]):
                sync_directory(parent)
        with only_printed():
            if self.place.is_staged:
                remove_directory(directory, target)
            else:
                remove_replaced(target, self.place.save_id)
        self._lock.release()


def encode_index(
    save_id: str,
    files: Sequence[_core.RankFile],
    metadata: bytes,
    notes: Sequence[tuple[str, str]],
    *,
    has_sums: bool,
) -> bytes:
    """The index of the files of all ranks beside these bytes of ``.metadata``."""
    digest = _core.digest(metadata)
    return _core.encode_index(bytes.fromhex(save_id), len(metadata), digest, notes, files, has_sums=has_sums)


def notes_of_save(num_ranks: int, seconds: Mapping[str, float] = MappingProxyType({})) -> list[tuple[str, str]]:
    """The notes of a save in its index."""
    torch: Any = sys.modules.get("torch")
    # Commands start sooner without this module.
    torch_version = torch.__version__ if torch else importlib.import_module("importlib.metadata").version("torch")
    notes = [("world_size", str(num_ranks)), ("torch", torch_version), ("torchtitan_ext", __version__)]
    of_phases = " ".join(f"{phase} {one:09.3f}" for phase, one in seconds.items())
    return [*notes, ("seconds", of_phases)] if of_phases else notes


def begin_save(path: Path, save_id: str, *, names_have_id: bool = False) -> RunningSave:
    """Takes the lock of a target, removes the leftovers of dead saves there, and decides where the new save writes.

    Args:
        names_have_id: Name rank files by the save id wherever the save writes.

    Raises:
        SaveInProgressError: Another save is under way there.
        FileExistsError: The target holds safetensors.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"save: got a file, expected a directory: '{target}'")
    if target.is_dir():
        refuse_old_weights(target, [path.name for path in safetensors_paths(target)])
    new_parents = make_directories(target.parent)
    lock_file = lock_path(target)
    if lock_file.parent == target:
        new_parents += make_directories(target)
    lock = SaveLock.acquire(lock_file, save_id, target)
    try:
        for other in _excluded_locks(target):
            if other != lock_file:
                remove_dead_lock(other)
        if lock_file.parent != target:
            remove_dead_saves(target.parent, lock_file)
        if target.exists():
            remove_dead_files(target)
        is_staged = lock_file.parent != target and _make_stage(target, save_id)
        if not is_staged:
            new_parents += make_directories(target)
        place = SavePlace(save_id, target, is_staged, is_named_by_id=names_have_id or not is_staged)
        lock.add_line(_place_line(place))
        return RunningSave(lock, place, new_parents)
    except BaseException:
        lock.release()
        raise


def refuse_old_weights(target: Place, names: Iterable[str]) -> None:
    """Raises FileExistsError if there are safetensors among the names of what is at a target."""
    weights = min((name for name in names if name.endswith(".safetensors")), default=None)
    if weights is not None:
        raise FileExistsError(
            f"{target} holds {weights}, old weights that Hugging Face's libraries would open in place of this "
            "checkpoint; save to another directory, or remove them first"
        )


class NotSharedError(OSError, RuntimeError):
    """A rank does not see the directory: it is not shared, or this rank has lost it, which is an error of storage."""


def find_place(path: Path, rank: int) -> SavePlace:
    """Where this rank writes, as the coordinator's ``begin_save`` has decided. Every rank calls it.

    Raises:
        NotSharedError: This rank does not see the lock.
    """
    target = Path(os.path.realpath(path))
    lock_files = [lock_beside(target), target / LOCK_NAME]
    deadline = clock.now() + _SHOWN_SECONDS
    while True:
        for lock_file in lock_files:
            state = read_lock(lock_file)
            if state is not None and state.owner is not None and state.lines:
                return _place_of_line(state.lines[0], state.owner.save_id, target)
        if clock.now() > deadline:
            raise NotSharedError(
                f"{path} is not in a shared directory: rank {rank} does not see what the coordinator wrote there; "
                "save to a file system that all ranks have"
            )
        clock.sleep(0.05)


def _place_line(place: SavePlace) -> str:
    return json.dumps({"is_staged": place.is_staged, "is_named_by_id": place.is_named_by_id})


def _place_of_line(line: str, save_id: str, target: Path) -> SavePlace:
    return SavePlace(save_id, target, **json.loads(line))


def lock_path(target: Path) -> Path:
    """The lock of a save: beside the target, or in it if nothing can be made or renamed beside it."""
    has_room = os.access(target.parent, os.W_OK | os.X_OK) and not _is_mounted(target)
    return lock_beside(target) if has_room else target / LOCK_NAME


def lock_beside(target: Path) -> Path:
    """The lock of a target that can be replaced as a whole."""
    return target.parent / f"{LOCK_PREFIX}{_core.digest(os.fsencode(target.name)):016x}"


def _excluded_locks(target: Path) -> list[Path]:
    """Locks that no other save may hold meanwhile: both of the target, since an earlier job may have seen it as a mount
    point, and those of single ranks, which version 0.2 saved."""
    names = os.listdir(target) if target.exists() else []
    of_ranks = [target / name for name in names if _LOCK_OF_RANK.fullmatch(name)]
    return [lock_beside(target), target / LOCK_NAME, *of_ranks]


def _is_mounted(target: Path) -> bool:
    """Whether a file system or a directory is mounted at the target, which cannot be renamed then."""
    if os.path.ismount(target):
        return True
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        places = {line.split()[4] for line in stream}
    return str(target).replace("\\", "\\134").replace(" ", "\\040") in places


def _take_name(stage: Path, target: Path) -> None:
    """Gives the stage the name of the target; the two change places if the target is not empty."""
    try:
        os.rename(stage, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _core.exchange_paths(os.fsencode(stage), os.fsencode(target))


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _make_stage(target: Path, save_id: str) -> bool:
    """Makes the directory that will replace the target; returns false if it could not replace it."""
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
    """Whether the file system can exchange directories; tried with two new ones."""
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


def make_directories(path: Path) -> list[Path]:
    """Makes a directory and its parents; returns the parent of each new directory.

    Raises:
        NotADirectoryError: A file stands where one of them is to be, as where a disk is not mounted.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    nearest = missing[-1].parent if missing else path
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "got a file, expected a directory; move it", str(nearest))
    path.mkdir(parents=True, exist_ok=True)
    return [directory.parent for directory in missing]
