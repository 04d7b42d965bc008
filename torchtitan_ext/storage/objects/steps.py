"""The newest step of a run in an object store. Imports no torch."""

from __future__ import annotations

from torchtitan_ext.storage.commit.steps import steps_among
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder


def latest_object_step(run: Location, pattern: str | None = None) -> Location | None:
    """The newest finished step of a run; ``None`` without one. Asks the store of no step below it.

    Args:
        pattern: How the run names its steps, as in ``step_paths``.
    """
    folder = ObjectFolder(run)
    names = steps_among(folder.folders(), pattern)
    for number in sorted(names, reverse=True):
        if folder.stamp(f"{names[number]}/.metadata") is not None:
            return run / names[number]
    return None
