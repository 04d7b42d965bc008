"""Replaces the safetensors files of a directory, which may hold foreign files, such as a tokenizer."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import safetensors_paths, sync_directory, write_file
from torchtitan_ext.storage.commit.commit import NOT_SUPPORTED
from torchtitan_ext.storage.commit.leftovers import checkpoint_names, same_attributes
from torchtitan_ext.storage.commit.staged_target import take_place
from torchtitan_ext.storage.formats.safetensors_files import (
    INDEX_NAME,
    INDEX_SUFFIX,
    SafetensorsEntry,
    index_of,
    read_header,
)


def refuse_irreplaceable(directory: Path) -> None:
    """Raises FileExistsError if safetensors files cannot be replaced safely in a directory."""
    ours, _ = checkpoint_names(directory)
    if ours:
        raise FileExistsError(f"{directory} holds {min(ours)} of a checkpoint of DCP; use another directory")
    if _has_others(directory) and not _indices_in(directory):
        keys = [fqn for path in safetensors_paths(directory) for fqn in _entries_of(path)]
        if len(keys) > len(set(keys)):
            raise FileExistsError(
                f"{directory} holds tensors of which several files have chunks, beside files of others; use another "
                "directory"
            )


def replace_weights(new: Path, target: Path) -> None:
    """Replaces a directory of safetensors files by a new one, which has an index if it has several files.

    If the target holds nothing else, the two change places at once. Otherwise, and if the file system cannot exchange
    directories, or the new one cannot have the owner and the mode of the target, the files are moved into the target,
    and foreign files stay. At every moment, also after a kill, a reader sees all old tensors or all new ones if it
    follows the index, like this package, or looks for ``model.safetensors`` first, like Hugging Face's loaders. A
    reader that takes all files may see both for a moment. If there were no tensors before, a read fails until all
    files are there. The next call removes leftovers of a kill.

    Raises:
        OSError: A file cannot be moved or removed.
    """
    if not target.is_dir():
        return take_place(new, target)
    if not _has_others(target) and _can_be_replaced(target, new):
        try:
            return take_place(new, target)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
    names = [path.name for path in safetensors_paths(new)]
    old_names = [path.name for path in safetensors_paths(target)]
    if not old_names:
        for name in [*_indices_in(new), *names]:  # the index first: it names files that are not there yet
            os.rename(new / name, target / name)
        return sync_directory(target)
    if not _indices_in(target):
        _put_index(target, old_names)  # so that readers ignore the new files beside them
    own = uuid.uuid4().hex[:8]
    for name in names:
        os.rename(new / name, target / f"{own}-{name}")
    _put_index(target, [f"{own}-{name}" for name in names])
    _remove(target, [*(name for name in _indices_in(target) if name != INDEX_NAME), *old_names])
    _rename_indexed(target, {f"{own}-{name}": name for name in names})


def _can_be_replaced(target: Path, new: Path) -> bool:
    """Whether nobody would notice that a directory is another one, which gets its mode for that."""
    # A process whose directory is replaced would stand in one that is gone.
    if os.path.samefile(target, os.curdir):
        return False
    new.chmod(target.stat().st_mode & 0o7777)
    return same_attributes(new, target)


def _rename_indexed(directory: Path, new_names: dict[str, str]) -> None:
    """Renames files that an index names; does nothing if the file system has no hard links."""
    for name, new_name in new_names.items():
        try:
            os.link(directory / name, directory / new_name)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            return
    _put_index(directory, new_names.values())
    _remove(directory, new_names)
    if len(new_names) == 1:
        _remove(directory, [INDEX_NAME])


def _put_index(directory: Path, names: Iterable[str]) -> None:
    """Replaces the index at once by one of these files."""
    entries = {(fqn, name): entry for name in names for fqn, entry in _entries_of(directory / name).items()}
    partial = directory / f"{INDEX_NAME}.partial"
    write_file(partial, index_of(dict(entries.keys()), sum(entry.num_bytes for entry in entries.values())), sync=True)
    sync_directory(directory)  # the files that it names
    os.replace(partial, directory / INDEX_NAME)
    sync_directory(directory)


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        os.unlink(directory / name)
    sync_directory(directory)


def _indices_in(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(INDEX_SUFFIX))


def _has_others(directory: Path) -> bool:
    return any(not name.endswith((".safetensors", INDEX_SUFFIX)) for name in os.listdir(directory))


def _entries_of(path: Path) -> dict[str, SafetensorsEntry]:
    """The entries of a file; empty if it is damaged, since its tensors cannot be read."""
    try:
        return read_header(path)
    except DamagedCheckpointError:
        return {}
