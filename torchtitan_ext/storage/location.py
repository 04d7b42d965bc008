"""A URL of an object store in the place of a path: ``s3://bucket/run/step-100``. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})


class Location(os.PathLike[str]):
    """A folder of an object store, or an object in it: as much of a ``Path`` as places of checkpoints need.

    A ``Path`` would make ``s3:/bucket`` of ``s3://bucket``. ``str`` and ``os.fspath`` give the URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._url = os.fspath(url).rstrip("/")

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Location({self._url!r})"

    def __fspath__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self._url.rpartition("/")[0])


Place = Path | Location
"""Where a checkpoint lies: a directory, or a folder of an object store."""


def place_at(path: str | os.PathLike[str]) -> Place:
    return Location(path) if is_in_object_store(path) else Path(path)


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether this names a directory and no URL. Unlike stock's check it accepts read-only directories."""
    return isinstance(path, Path) or "://" not in str(path)


def is_url(path: str | os.PathLike[str]) -> bool:
    return not is_local(path)


def is_in_object_store(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL of a store that commits checkpoints: of S3, Google's or Azure's, with ``obstore`` there.

    Other URLs go through DCP's storage for fsspec, which has neither commit nor checksums.
    """
    return names_object_store(path) and has_obstore()


def is_plain_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL that DCP's storage for fsspec reads and writes."""
    return not is_local(path) and not is_in_object_store(path)


def names_object_store(path: str | os.PathLike[str]) -> bool:
    """Whether this would be in an object store if ``obstore`` were there."""
    return not is_local(path) and scheme_of(path) in _SCHEMES


def scheme_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).partition("://")[0].lower()


@cache
def has_obstore() -> bool:
    return importlib.util.find_spec("obstore") is not None
