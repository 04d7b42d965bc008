"""Operations on one process group take turns, in the order in which they began.

A save in a thread and the next one would otherwise meet each other's collectives: each rank may be first in another of
them. All ranks begin operations in one order, as they do collectives, so that all take the same turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

# Of this process: who began last on a group, and has not ended.
_last: dict[dist.ProcessGroup, Turn] = {}
_changing = threading.Lock()

# How often who waits asks whether the one before is lost.
_WAIT_SLICE_SECONDS = 1.0


class Turn:
    """Of one operation; made when it is its turn. What begins inside of a phase of another is part of that one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.in_phase: int | None = None
        """The thread that works in a phase of the operation."""
        self.check: Callable[[], None] = lambda: None
        """Raises where the operation is lost, as in a write that never returns: nobody waits for it then."""
        self._group = group
        self._ended = threading.Event()
        with _changing:
            self._earlier = _last.get(group)
            _last[group] = self
        try:
            if self._earlier is not None and self._earlier.in_phase != threading.get_ident():
                while not self._earlier._ended.wait(_WAIT_SLICE_SECONDS):
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
