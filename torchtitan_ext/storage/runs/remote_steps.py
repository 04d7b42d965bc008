"""The steps of a run at a URL, by listings of the store, or fsspec's: those with a ``.metadata`` have finished."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import NamedTuple

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.commit.steps import steps_among
from torchtitan_ext.storage.location import Location, is_in_object_store
from torchtitan_ext.storage.objects.folder import ObjectFolder

_MAX_REQUESTS = 16


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
    folders, has_finished = _object_listing(run) if is_in_object_store(run) else _fsspec_listing(run)
    names = steps_among(folders, pattern)
    steps = RemoteSteps({}, {})
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        for (number, name), is_finished in zip(names.items(), pool.map(has_finished, names.values()), strict=True):
            (steps.finished if is_finished else steps.unfinished)[number] = f"{run.rstrip('/')}/{name}"
    return steps


def _object_listing(run: str) -> tuple[list[str], Callable[[str], bool]]:
    """The folders of a run, and whether one of them has a ``.metadata``."""
    folder = ObjectFolder(Location(run))
    return folder.folders(), lambda name: folder.stamp(f"{name}/.metadata") is not None


def _fsspec_listing(run: str) -> tuple[list[str], Callable[[str], bool]]:
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
    return folders, lambda name: filesystem.exists(f"{root.rstrip('/')}/{name}/.metadata")
