"""Futures as DCP wants them from a storage, of work that is done at once.

A future holds its error in C++, the error holds the frames that it passed, and one of these may hold the future: a
cycle that no garbage collector finds. All tensors of a save that failed would stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

from torchtitan_ext.errors import clear_frames


def finished(work: Callable[[], Any]) -> Future[Any]:
    """Does the work, and gives a future of its result or error."""
    future: Future[Any] = Future()
    result, error = _attempt(work)
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def result_of(future: Future[Any]) -> Any:
    """Waits for a future, to which the caller keeps no reference, and gives its result or raises its error."""
    try:
        future.wait()
        return future.value()
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        del future
