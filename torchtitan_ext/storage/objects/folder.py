"""The objects of one folder of a store, by their names in it; errors as those of files. Imports no torch.

Requests go through ``obstore``, which finds credentials as the tools of each store do, and tries again after errors of
the server and of the connection.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from torchtitan_ext.storage.location import Location, scheme_of

# How long one request may take, and how long it is tried again.
_REQUEST_SECONDS = 300
RETRY_SECONDS = 120

_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout", "user_agent")

_MAX_ERROR_CHARACTERS = 600

_MAX_TRIES = 3

_DENIED = re.compile(r"status code: 40[13]\b")
# What follows a question mark in a URL may be a signature.
_QUERY = re.compile(r"\?[^\s\"')>]+")


class ObjectStamp(NamedTuple):
    """One version of an object: its tag and generation, as far as the store has them, its size, and when it was put."""

    tag: str | None
    version: str | None
    num_bytes: int
    put_at: datetime

    def is_version(self, other: ObjectStamp | None) -> bool:
        """Whether this is the same version as another one; listings do not say all of it."""
        return other is not None and (self.tag, self.num_bytes) == (other.tag, other.num_bytes)


class ConflictError(Exception):
    """An object is not in the version that a conditional put asked for."""


class _Process:
    """Whether this process can use ``obstore``: threads do its requests, which a fork does not take along."""

    def __init__(self) -> None:
        self._is_used = self._is_forked = False
        os.register_at_fork(after_in_child=self._note_fork)

    def check(self, location: Location) -> None:
        """Raises OSError in a fork of a process that has used an object store: its requests would wait for ever."""
        if self._is_forked:
            detail = "this process was forked from one that has used an object store; start it by spawn or forkserver"
            raise OSError(errno.EPERM, detail, str(location))
        self._is_used = True

    def _note_fork(self) -> None:
        self._is_forked = self._is_used


_process = _Process()


class ObjectFolder:
    """The folder at a URL. May be pickled, and used by several threads."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def __reduce__(self) -> tuple[Callable[..., ObjectFolder], tuple[Location]]:
        return ObjectFolder, (self.location,)

    @property
    def _obstore(self) -> Any:
        _process.check(self.location)
        return import_module("obstore")

    @cached_property
    def _store(self) -> Any:
        url = re.sub("^s3a:", "s3:", str(self.location))
        from_url = import_module("obstore.store").from_url
        options = {"checksum_algorithm": "SHA256"} if scheme_of(url) == "s3" else {}
        return from_url(
            url,
            client_options=_client_options(scheme_of(url)),
            retry_config={"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            **options,
        )

    def read(self, name: str) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: There is none.
        """
        return self.read_stamped(name)[0]

    def content(self, name: str) -> bytes | None:
        """The whole object; ``None`` without one."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def read_stamped(self, name: str) -> tuple[bytes, ObjectStamp]:
        """The whole object, and which version of it that is."""
        with self.told(name):
            found = self._obstore.get(self._store, name)
            return bytes(found.bytes()), _stamp(found.meta)

    def read_range(self, name: str, begin: int, end: int) -> tuple[Any, int]:
        """Bytes ``[begin, end)`` of an object, as a buffer, and its size; fewer where the object ends before."""
        with self.told(name):
            found = self._obstore.get(self._store, name, options={"range": (begin, end)})
            return found.bytes(), found.meta["size"]

    def stamp(self, name: str) -> ObjectStamp | None:
        """The present version of an object; ``None`` without one."""
        try:
            with self.told(name):
                return _stamp(self._obstore.head(self._store, name))
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes) -> None:
        with self.told(name):
            self._obstore.put(self._store, name, content, use_multipart=False)

    def put_if(self, name: str, content: bytes, expected: ObjectStamp | None) -> None:
        """Puts an object if there is none, or only this version, in one request.

        Raises:
            ConflictError: There is another version; or an earlier try of this call succeeded and its answer was lost.
        """
        mode: Any = "create"
        if expected is not None:
            version = {"e_tag": expected.tag, "version": expected.version}
            mode = {key: value for key, value in version.items() if value is not None}
        attributes = {"Cache-Control": "no-store"}
        with self.told(name):
            self._obstore.put(self._store, name, content, mode=mode, use_multipart=False, attributes=attributes)

    def open_parts(self, name: str, part_bytes: int, max_parts: int) -> Any:
        """A writer of a new object: a single put, or parts of this size, so many of them under way at a time."""
        with self.told(name):
            return self._obstore.open_writer(self._store, name, buffer_size=part_bytes, max_concurrency=max_parts)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that are gone already are no error."""
        with self.told(names[0] if names else ""):
            if names:
                self._again(lambda: self._obstore.delete(self._store, list(names)))

    def stamps(self) -> dict[str, ObjectStamp]:
        """The objects right in the folder, by name."""
        with self.told(""):
            listed = self._again(lambda: self._obstore.list_with_delimiter(self._store))
            named = [(meta["path"].rpartition("/")[2], meta) for meta in listed["objects"]]
        return {name: _stamp(meta) for name, meta in named if name}  # without a name: the mark of an empty folder

    def folders(self) -> list[str]:
        """The names of the folders right in this one."""
        with self.told(""):
            listed = self._again(lambda: self._obstore.list_with_delimiter(self._store))
            return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    def _again(self, request: Callable[[], Any]) -> Any:
        """The answer to a request that may be repeated, which obstore does not do where the connection was reset."""
        for _ in range(_MAX_TRIES - 1):
            with suppress(self._obstore.exceptions.GenericError):
                return request()
        return request()

    @contextmanager
    def told(self, name: str) -> Iterator[None]:
        """Errors of the store as those of the operating system, with the URL in place of a path."""
        errors = import_module("obstore.exceptions")
        place = str(self.location / name) if name else str(self.location)
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", place) from None
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise ConflictError(f"{place}: {_text(error)}") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _text(error), place) from None
        except ValueError as error:  # a name that no object can have
            raise OSError(errno.EINVAL, _text(error), place) from None
        except (errors.BaseError, OSError) as error:
            code = errno.EACCES if _DENIED.search(str(error)) else errno.EIO  # of listings and parts
            raise OSError(code, _text(error), place) from None


def _client_options(scheme: str) -> dict[str, str]:
    """How to connect: what obstore would read from the environment, and more time for a request than its 30 seconds."""
    prefix = {"s3": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
    given = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in _CLIENT_OPTIONS}
    return {"timeout": f"{_REQUEST_SECONDS}s"} | {name: value for name, value in given.items() if value is not None}


def _stamp(meta: Any) -> ObjectStamp:
    return ObjectStamp(meta["e_tag"], meta["version"], meta["size"], meta["last_modified"])


def _text(error: BaseException) -> str:
    """What an error says, and the store's own words; no more of the answer, and no signature behind a URL."""
    told = str(error).partition("Debug source:")[0]
    line = _QUERY.sub("", told.partition("<?xml")[0].strip())
    answer = [match[1] for tag in ("Code", "Message") if (match := re.search(f"<{tag}>([^<]*)</{tag}>", told))]
    return " ".join([line[:_MAX_ERROR_CHARACTERS] or type(error).__name__, *answer])
