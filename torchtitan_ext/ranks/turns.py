"""Operations on one group take turns, in the order in which they began.

A save in a thread and the next save would otherwise mix their collectives. All ranks begin operations in one order, so
all take the same turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from torchtitan_ext import clock

# For each group the operation that began last, until it has ended. Operations of all threads meet here, which is what
# it is for: read and changed only under the lock.
_last: dict[dist.ProcessGroup, Turn] = {}
_changing = threading.Lock()

# How often a waiting operation asks whether the one before it is lost.
_WAIT_SLICE_SECONDS = 1.0


class Turn:
    """The turn of one operation on a group: making it waits for the operation before, ``end`` lets the next one begin.

    An operation that begins within a phase of another one, in its thread, is part of that one and does not wait.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.in_phase: int | None = None
        """The thread that works in a phase of the operation now."""
        self.check: Callable[[], None] = lambda: None
        """Raises if the operation is lost, as by a write that never returns: the next one then does not wait for it."""
        self._group = group
        self._ended = threading.Event()
        with _changing:
            self._earlier = _last.get(group)
            _last[group] = self
        try:
            if self._earlier is not None and self._earlier.in_phase != threading.get_ident():
                while not clock.wait(self._earlier._ended, _WAIT_SLICE_SECONDS):
                    self._earlier.check()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Lets the next one begin."""
        with _changing:
            if _last.get(self._group) is self:
                if self._earlier is not None and not self._earlier._ended.is_set():
                    _last[self._group] = self._earlier
                else:
                    del _last[self._group]
            self._earlier = None
            self._ended.set()
