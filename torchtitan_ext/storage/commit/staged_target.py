"""New files and directories of other formats, which replace a target at once when they are whole."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import sync_directory
from torchtitan_ext.storage.commit.commit import lock_path, make_directories
from torchtitan_ext.storage.commit.save_lock import SaveLock


@contextmanager
def staged_target(target: Path, replace: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A path beside the target that replaces it when the block ends without an error.

    The block makes a file or a directory at the path, and syncs its content. After a kill at any moment the target is
    the old or the new one. Leftovers of a killed predecessor are removed first.

    Args:
        replace: Called with path and target to replace the target: ``take_place``, or a function that does more.

    Raises:
        SaveInProgressError: Another process writes to the target.
    """
    target = Path(os.path.realpath(target))
    make_directories(target.parent)
    lock = SaveLock.acquire(lock_path(target), uuid.uuid4().hex, target)
    # Beside the lock: where nothing can be made or renamed beside the target, it is in there.
    staged = lock.path.parent / f"tte_new-{_core.digest(os.fsencode(target.name)):016x}.partial"
    try:
        _remove(staged)
        yield staged
        lock.check()
        replace(staged, target)
        sync_directory(target.parent)
    finally:
        _remove(staged)
        lock.release()


def take_place(staged: Path, target: Path) -> None:
    """Gives a file or a directory the name of the target at once. A target that is a directory gets the other name.

    Raises:
        OSError: For example, the file system cannot exchange directories.
    """
    if staged.is_dir() and target.exists():
        _core.exchange_paths(os.fsencode(staged), os.fsencode(target))
    else:
        os.replace(staged, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
