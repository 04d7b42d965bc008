"""Which files belong to a checkpoint, and which of them can be removed.

Only files with names that our saves or stock DCP give are ever removed: a target may hold foreign files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import warn
from torchtitan_ext.storage.checkpoint_files import (
    SHARED_NAME,
    index_path,
    metadata_path,
    sharing_save,
    shown,
    sync_directory,
)
from torchtitan_ext.storage.commit.save_lock import LockState, is_surely_dead, read_lock

LOCK_PREFIX = ".tte_save-"

# Two directories in a new stage that try to change places, before a save counts on it.
PROBES = (".tte_probe-1", ".tte_probe-2")

_STAGE = re.compile(r"\.tte-([0-9a-f]{32})")
_OF_CHECKPOINT = re.compile(
    r"(__\d+)?\.metadata(\.tmp)?|__\d+_(\d+|[0-9a-f]{32})\.distcp|(__\d+)?\.tte_index(\.[0-9a-f]{32})?"
    f"|{SHARED_NAME}"
)
_SAVE_ID = re.compile(r"__\d+_(?:[0-9a-f]{32}\.[01]\.)?([0-9a-f]{32})\.distcp|(?:__\d+)?\.tte_index\.([0-9a-f]{32})")
_RANK_METADATA = re.compile(r"__\d+\.metadata")


def stage_path(target: Path, save_id: str) -> Path:
    """Where a save puts its files until its commit. The name must not contain ``step-<number>``: torchtitan takes such
    directories for checkpoints."""
    return target.parent / f".tte-{save_id}"


def is_checkpoint_name(name: str) -> bool:
    """Whether our saves or stock DCP give such a name to a file of a checkpoint."""
    return _OF_CHECKPOINT.fullmatch(name) is not None


def checkpoint_names(directory: Path) -> tuple[list[str], list[str]]:
    """The names of a checkpoint's files in a directory, and all other names."""
    ours: list[str] = []
    others: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            is_ours = is_checkpoint_name(entry.name) and entry.is_file(follow_symlinks=False)
            (ours if is_ours else others).append(entry.name)
    return ours, others


def find_dead_saves(directory: Path, own_lock: Path | None = None) -> tuple[list[tuple[Path, Path | None]], list[Path]]:
    """The leftovers of dead saves in a directory. The locks show which saves still run.

    Returns:
        Their directories, each with its target if that is known; their lock files.
    """
    # In this order: a save makes its lock before its stage, and removes it after.
    stages = {match[1]: directory / match[0] for name in os.listdir(directory) if (match := _STAGE.fullmatch(name))}
    locks = [directory / name for name in os.listdir(directory) if name.startswith(LOCK_PREFIX)]
    states: dict[Path, LockState] = {}
    are_all_known = True
    for path in locks:
        try:
            state = read_lock(path)
        except PermissionError:  # a lock of another user
            are_all_known = False
        else:
            states |= {} if state is None else {path: state}
            # Any stage may belong to a lock that has just been made, or that this machine does not see in full yet.
            are_all_known &= state is None or state.owner is not None or is_surely_dead(state)
    owners = {state.owner.save_id: state.owner for state in states.values() if state.owner is not None}
    dead = {path: state for path, state in states.items() if path != own_lock and is_surely_dead(state)}
    dead_ids = {state.owner.save_id for state in dead.values() if state.owner is not None}
    dead_stages = [
        (path, Path(owners[save_id].path) if save_id in owners else None)
        for save_id, path in stages.items()
        if save_id in dead_ids or (are_all_known and save_id not in owners)
    ]
    return dead_stages, list(dead)


def remove_dead_saves(directory: Path, own_lock: Path | None = None) -> None:
    """Removes what ``find_dead_saves`` finds."""
    stages, locks = find_dead_saves(directory, own_lock)
    if stages:
        # The rename of a dead save must be on the disk before the files that it replaced are removed.
        sync_directory(directory)
    for stage, target in stages:
        remove_directory(stage, target)
    remove_files(directory, [path.name for path in locks])


def find_dead_files(target: Path) -> list[str]:
    """Files of dead saves in place: those with another save id in their names than the metadata has, and files made to
    be shared that the metadata does not name."""
    names, _ = checkpoint_names(target)
    if any(_RANK_METADATA.fullmatch(name) for name in names):
        return []  # they may belong to checkpoints of single ranks
    ids = {name: found for name in names if (found := save_id_of(name))}
    shared = {name for name in names if sharing_save(name) is not None}
    is_one_save = len(set(ids.values())) == 1 and not any(
        name.endswith(".distcp") for name in set(names) - set(ids) - shared
    )
    path = metadata_path(target, None)
    if not ids or (is_one_save and path.exists() and any(".tte_index" in name for name in names)):
        return []  # reading the metadata, to know more, may take seconds
    committed, named = _committed(target)
    if committed == "":
        return []
    return [name for name in (*ids, *sorted(shared)) if ids.get(name) != committed and name not in named]


def remove_dead_files(target: Path) -> None:
    """Removes the files that ``find_dead_files`` finds. The caller holds the lock of the target."""
    dead = find_dead_files(target)
    if dead:
        sync_directory(target)
        remove_files(target, dead)


def remove_replaced(target: Path, save_id: str) -> None:
    """Removes the files that a save in place has replaced."""
    names, _ = checkpoint_names(target)
    remove_files(target, [name for name in names if name != ".metadata" and save_id_of(name) != save_id])


def remove_directory(directory: Path, target: Path | None) -> None:
    """Removes the directory of a checkpoint. Foreign files move to the target, or stay, with a warning."""
    try:
        ours, others = checkpoint_names(directory)
        # .metadata first, so that the rest is not taken for a checkpoint.
        remove_files(directory, sorted(ours, key=lambda name: not name.endswith(".metadata")))
        for name in others:
            if name in PROBES:
                (directory / name).rmdir()
            elif target is not None and target.is_dir() and not os.path.lexists(target / name):
                os.rename(directory / name, target / name)
        directory.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        warn(f"{directory} stays: it cannot be removed, or holds others' files ({error})")


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Removes files; one that cannot be removed stays for the next save, with a warning."""
    for name in names:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            warn(f"{directory / name} stays: it cannot be removed ({error})")


def save_id_of(name: str) -> str | None:
    """The id of the save that a file belongs to, by its name; ``None`` where that does not say, as of a link."""
    match = _SAVE_ID.fullmatch(name)
    return None if match is None else match[1] or match[2]


def same_attributes(first: Path, second: Path) -> bool:
    """Whether two directories have the same user, group, mode and extended attributes (access lists, stripes)."""
    return _attributes(first) == _attributes(second)


def _attributes(path: Path) -> tuple[int, int, int, dict[str, bytes]]:
    status = path.stat()
    extended: dict[str, bytes] = {}
    with contextlib.suppress(OSError):  # a file system that has none
        extended = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), extended


def _committed(target: Path) -> tuple[str | None, set[str]]:
    """The save id in the metadata, and the data files that it names.

    The id is ``None`` if there is no metadata, empty if it contains no id.
    """
    try:
        metadata = _core.read_metadata_pickle(metadata_path(target, None).read_bytes())
    except FileNotFoundError:
        return _committed_by_index(index_path(target, None))
    except ValueError:
        return "", set()
    return (metadata.storage_meta or {}).get("save_id") or "", {file.path for file in metadata.columns.describe_files()}


def _committed_by_index(path: Path) -> tuple[str | None, set[str]]:
    """The same of the index of a staged save, whose ``.metadata`` is lost, or was not written, as version 0.2 could."""
    try:
        index = _core.parse_index(path.read_bytes(), shown(path))
    except FileNotFoundError:
        return None, set()
    except ValueError:
        return "", set()
    return index.save_id.hex(), set(index.files)
