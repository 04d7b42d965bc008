"""Where new checkpoints go."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class TargetExistsError(FileExistsError):
    """There is something at the place of a new checkpoint, which ``overwrite`` would replace."""


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raises TargetExistsError where there is something else than an empty directory, unless it may be replaced."""
    is_free = not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))
    if not overwrite and not is_free:
        raise TargetExistsError(errno.EEXIST, "is there already; pass overwrite=True to replace it", str(target))
