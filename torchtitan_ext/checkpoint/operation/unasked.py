"""Errors of asynchronous saves that nobody asks for: the next operation on the group raises them, or the exit prints.

A failed save is forgotten once its future was asked on some rank, by ``result`` or ``exception``, or here.
"""

from __future__ import annotations

import atexit
import sys
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from torchtitan_ext.checkpoint.operation.phases import Phases, key_of
from torchtitan_ext.errors import LostRankError, warn

_ASKING = "ranks agreed whether the error of an earlier save was seen"


class SaveFuture(Future[Any]):
    """The future of a save, which knows whether its outcome was asked for.

    Args:
        warns: Whether an error that nobody asked for is only warned of by the next operation.
        prints: Whether this rank prints such an error at the exit of the process.
    """

    def __init__(self, *, warns: bool, prints: bool) -> None:
        super().__init__()
        self.warns = warns
        self.prints = prints
        self.was_asked = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.was_asked |= self.done()
            del self  # which holds the error, whose frames hold this one

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.was_asked |= self.done()
            del self


# By ``key_of`` a group the last save that failed; only the operation whose turn it is on a group changes its own.
_failed: WeakKeyDictionary[object, tuple[SaveFuture, BaseException]] = WeakKeyDictionary()
# Of all groups, those that are gone too.
_unasked: dict[SaveFuture, BaseException] = {}


def note_failure(phases: Phases, future: SaveFuture, error: BaseException) -> None:
    """Keeps the error of a save until it is asked for. Every rank calls it, while it is the save's turn."""
    _unasked[future] = error
    _failed[key_of(phases.group)] = future, error


def raise_unasked(phases: Phases) -> None:
    """Raises, or warns of, what an earlier asynchronous save on the group raised, unless some rank has asked for it.

    The first call of an operation. Collective where there is such a save, which all ranks know alike.

    Raises:
        BaseException: What the save raised.
    """
    found = _failed.pop(key_of(phases.group), None)
    for future in [future for future in _unasked if future.was_asked]:
        del _unasked[future]
    if found is None:
        return
    future, error = found
    was_asked = future.was_asked
    if not isinstance(error, LostRankError):  # after which the group can do nothing more
        was_asked = any(phases.on_all("prepare", lambda: future.was_asked, doing=_ASKING))
    future.was_asked = True
    _unasked.pop(future, None)
    if was_asked:
        return
    if not future.warns:
        raise error
    text = f"an earlier async_save failed, and nobody asked its future: {error}"
    phases.to_coordinator("prepare", lambda: None, lambda _: warn(text), doing=_ASKING)


@atexit.register
def _print_unasked() -> None:
    for future, error in _unasked.items():
        if not future.was_asked and (future.prints or isinstance(error, LostRankError)):
            print(f"torchtitan_ext: an async_save failed, and nobody asked its future: {error}", file=sys.stderr)
