"""Where new checkpoints go."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raises FileExistsError where there is something else than an empty directory, unless it may be replaced."""
    is_free = not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))
    if not overwrite and not is_free:
        what = "is there already; pass --overwrite (overwrite=True) to replace it, or another place"
        raise FileExistsError(errno.EEXIST, what, str(target))
