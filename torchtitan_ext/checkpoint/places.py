"""Whether the paths that ranks give for a checkpoint name one place.

Paths with a time in them, or with a step that is one off, do not. But one directory may have several names: by links,
mount points, from another working directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ext.errors import Problem, named
from torchtitan_ext.storage.checkpoint_files import is_local

_MAX_RANKS = 8


@dataclass(frozen=True)
class Place:
    """Where a rank says that a checkpoint is.

    Attributes:
        path: Its absolute path, or URL; empty where storage knows it alone.
        identity: Equal for all names of one directory, on the hosts that share it: the inode of the nearest directory
            that is there, and the names below it. ``None`` for a URL.
    """

    path: str
    identity: tuple[int, str] | None = None


def place_of(path: str | os.PathLike[str] | None) -> Place:
    """This rank's place of a checkpoint, which need not be there yet."""
    if path is None:
        return Place("")
    if not is_local(path):
        return Place(str(path).rstrip("/"))
    real = Path(os.path.realpath(path))
    for there in (real, *real.parents):
        try:
            return Place(str(real), (there.stat().st_ino, str(real.relative_to(there))))
        except OSError:
            continue
    return Place(str(real))


def place_problems(places: Sequence[Sequence[Place]]) -> list[Problem]:
    """A problem for each checkpoint of which ranks name different places.

    Args:
        places: Per rank those of all its checkpoints.
    """
    problems = []
    for of_ranks in zip(*places, strict=False):
        ranks_at: dict[Place, list[int]] = {}
        for rank, place in enumerate(of_ranks):
            ranks_at.setdefault(place, []).append(rank)
        paths = {place.path for place in ranks_at}
        identities = {place.identity for place in ranks_at}
        if len(paths) > 1 and (len(identities) > 1 or None in identities):
            listed = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {named(ranks, _MAX_RANKS)} {place.path or 'no path'}"
                for place, ranks in list(ranks_at.items())[:_MAX_RANKS]
            )
            detail = (
                f"ranks name different directories: {listed}; pass the same path on every rank: make a name with a "
                "time or a step in it on one rank, and broadcast it"
            )
            problems.append(Problem("ranks_disagree", "path", detail))
    return problems
