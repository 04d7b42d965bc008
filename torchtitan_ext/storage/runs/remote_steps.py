"""The steps of a run at a URL, through fsspec's listings.

Nothing is committed there: a step has finished where it has a ``.metadata``, which stock's writer stores last.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.commit.steps import steps_among


class RemoteSteps(NamedTuple):
    """The URLs of a run's steps by their numbers: those that have finished, and the others."""

    finished: dict[int, str]
    unfinished: dict[int, str]


def remote_steps(run: str, pattern: str | None = None) -> RemoteSteps:
    """The steps of a run at a URL. Not collective.

    Args:
        pattern: How the run names its steps, as in ``step_paths``.

    Raises:
        WrongValueError: fsspec knows no such protocol, or misses a package for it.
        OSError: The storage cannot be listed.
    """
    fsspec = import_module("fsspec.core")  # torch needs it; it takes a fifth of a second
    try:
        filesystem, root = fsspec.url_to_fs(run)
    except (ImportError, ValueError) as error:
        raise WrongValueError(f"{run} cannot be listed: {error}") from None
    filesystem.invalidate_cache()
    try:
        entries = filesystem.ls(root, detail=True)
    except FileNotFoundError:
        entries = []
    folders = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
    steps: tuple[dict[int, str], dict[int, str]] = {}, {}
    for number, name in steps_among(folders, pattern).items():
        has_finished = filesystem.exists(f"{root.rstrip('/')}/{name}/.metadata")
        steps[not has_finished][number] = f"{run.rstrip('/')}/{name}"
    return RemoteSteps(*steps)
