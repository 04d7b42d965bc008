"""An object store in this process: obstore's ``MemoryStore`` in the place of every bucket, with faults at calls.

Example: the store has the first conditional put, and its client does not learn of it.
    with StoreInMemory().in_place() as store:
        store.at("put", "/.metadata$", lose_answer, calls={1})
        tte.save(state, "s3://bucket/step-1", no_dist=True)
"""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import obstore
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from torchtitan_ext.storage.objects.folder import ObjectFolder

Act = Callable[[Callable[[], Any]], Any]
"""What happens to a call: given the call itself, which it may make, and make again. Returns the answer or raises."""


def cut_before(proceed: Callable[[], Any]) -> Any:
    """The request does not arrive."""
    raise GenericError("error sending request")


def lose_answer(proceed: Callable[[], Any]) -> Any:
    """The request arrives, its answer does not."""
    proceed()
    raise GenericError("error sending request")


def repeat(proceed: Callable[[], Any]) -> Any:
    """As obstore does after a lost answer: a conditional put conflicts with its own first try."""
    proceed()
    return proceed()


def refuse(error: BaseException) -> Act:
    def act(proceed: Callable[[], Any]) -> Any:
        raise error

    return act


class Held:
    """A put that its client gives up, and that arrives when it is released."""

    def __init__(self) -> None:
        self._puts: list[Callable[[], Any]] = []

    def __call__(self, proceed: Callable[[], Any]) -> Any:
        self._puts.append(proceed)
        raise GenericError("error sending request")

    def release(self) -> None:
        for put in self._puts:
            put()


@dataclass
class Rule:
    call: str
    name: re.Pattern[str]
    act: Act
    calls: Container[int] | None
    num_calls: int = 0
    num_fired: int = 0


class StoreInMemory:
    """Has those functions of the module ``obstore`` that ``ObjectFolder`` calls; a store is the path of a folder."""

    exceptions = obstore.exceptions

    def __init__(self) -> None:
        self._objects = MemoryStore()
        self._rules: list[Rule] = []

    @contextmanager
    def in_place(self) -> Iterator["StoreInMemory"]:
        """Every ``ObjectFolder`` of this process lies in this store."""
        path = property(lambda folder: str(folder.location).partition("://")[2])
        with patch.object(ObjectFolder, "_store", path), patch.object(ObjectFolder, "_obstore", self):
            yield self

    def at(self, call: str, name: str, act: Act, calls: Container[int] | None = None) -> Rule:
        """From now on calls of a function with an object of such a name meet a fault: all, or those with these numbers,
        counted from 1. Of several rules the first one that strikes decides.
        """
        rule = Rule(call, re.compile(name), act, calls)
        self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        self._rules.remove(rule)

    def get(self, store: str, name: str, **options: Any) -> Any:
        path = f"{store}/{name}"
        return self._do("get", path, lambda: obstore.get(self._objects, path, **options))

    def head(self, store: str, name: str) -> Any:
        path = f"{store}/{name}"
        return self._do("head", path, lambda: obstore.head(self._objects, path))

    def put(self, store: str, name: str, content: bytes, **options: Any) -> Any:
        path = f"{store}/{name}"
        return self._do("put", path, lambda: obstore.put(self._objects, path, content, **options))

    def open_writer(self, store: str, name: str, **options: Any) -> Any:
        path = f"{store}/{name}"
        return self._do("open_writer", path, lambda: obstore.open_writer(self._objects, path, **options))

    def delete(self, store: str, names: Sequence[str]) -> None:
        paths = [f"{store}/{name}" for name in names]
        self._do("delete", " ".join(paths), lambda: obstore.delete(self._objects, paths))

    def list_with_delimiter(self, store: str) -> Any:
        return self._do("list", store, lambda: obstore.list_with_delimiter(self._objects, store))

    def _do(self, call: str, path: str, proceed: Callable[[], Any]) -> Any:
        for rule in self._rules:
            if rule.call == call and rule.name.search(path):
                rule.num_calls += 1
                if rule.calls is None or rule.num_calls in rule.calls:
                    rule.num_fired += 1
                    return rule.act(proceed)
        return proceed()
