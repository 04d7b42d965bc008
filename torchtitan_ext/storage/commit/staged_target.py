"""New files and directories of other formats that take their place at once, when they are whole."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import sync_directory
from torchtitan_ext.storage.commit.commit import lock_path
from torchtitan_ext.storage.commit.save_lock import SaveLock


@contextmanager
def staged_target(target: Path, replace: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A path beside the target that takes its place when the block ends without an error.

    The target is what it was before, or whole, whoever is killed meanwhile. What a dead predecessor left is removed
    first. The block makes a file or a directory at the path, and syncs what is in it.

    Args:
        replace: Puts the first in the place of the second: ``take_place``, or what does more.

    Raises:
        SaveInProgressError: Somebody else writes to the target.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = SaveLock.acquire(lock_path(target, None), uuid.uuid4().hex, target)
    # No hidden name: torch.save takes what is before the first dot for the name of its archive.
    staged = target.parent / f"tte_new-{_core.digest(os.fsencode(target.name)):016x}.partial"
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
    """Gives a file or a directory the name of another one, at once; a directory that was there has the first name then.

    Raises:
        OSError: Among others, that the file system cannot let directories change places.
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
