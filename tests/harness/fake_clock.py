"""A time that passes only where all threads wait for it. One of them runs at a time, so every run is the same one.

    def test_the_first_comes_late(monkeypatch):
        fake = FakeClock(monkeypatch)
        fake.run({0: lambda: clock.sleep(100), 1: lambda: clock.sleep(1)})
        assert fake.seconds == 100

It takes the place of the functions of ``torchtitan_ext.clock``. A thread gives its turn away where it calls one that
waits, and gets it back when what it waits for is so, or when nobody else can go on and its time is the next.

Threads belong to ranks, which can be stopped and go on, or die, as processes do: ``stop``, ``go_on``, ``kill``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest

from torchtitan_ext import clock

Work = Callable[[], Any]


class Killed(BaseException):
    """Ends the threads of a dead rank, when all others have ended."""


class RankThread(threading.Thread):
    """One thread of a rank. ``result`` is what its work returned, ``error`` what it raised."""

    def __init__(self, fake: FakeClock, rank: Hashable, work: Work) -> None:
        super().__init__(daemon=True)
        self.rank = rank
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_at: float | None = None
        self.turn = threading.Semaphore(0)
        self.is_so: Callable[[], object] = lambda: True
        self.due = math.inf
        self._fake = fake
        self._work = work

    def run(self) -> None:
        self.turn.acquire()
        try:
            if self.rank not in self._fake.dead:
                self.result = self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended_at = self._fake.seconds
        self._fake.pass_on()


class FakeClock:
    """The clock of a test, from 0 seconds on.

    Attributes:
        seconds: The time.
        running: The thread whose turn it is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.running: RankThread | None = None
        self.threads: list[RankThread] = []  # who has waited longest for its turn comes first
        self.stopped: set[Hashable] = set()
        self.dead: set[Hashable] = set()
        self._is_over = threading.Event()
        functions: dict[str, Callable[..., Any]] = {
            "now": lambda: self.seconds,
            "sleep": lambda seconds: self._wait(lambda: False, seconds),
            "wait": lambda event, seconds: self._wait(event.is_set, seconds),
            "wait_for": self._wait_for,
            "join": lambda thread, seconds: self._wait(lambda: has_ended(thread), seconds),
        }
        for name, function in functions.items():
            monkeypatch.setattr(clock, name, for_ranks(function, getattr(clock, name)))

    @property
    def rank(self) -> Any:
        """Whose thread is running."""
        assert self.running is not None, "outside of FakeClock.run"
        return self.running.rank

    def run(self, works: Mapping[Any, Work]) -> dict[Any, Any]:
        """Runs the work of each rank, and the threads that it starts. Returns what it returned, or raised, on each rank
        where it ended."""
        firsts = [self._begin(rank, work) for rank, work in works.items()]
        self.pass_on()
        self._is_over.wait()
        results = {
            thread.rank: thread.error or thread.result
            for thread in firsts
            if thread.ended_at is not None and thread.rank not in self.dead
        }
        for thread in [thread for thread in self.threads if thread.ended_at is None]:
            self.dead.add(thread.rank)
            self.running = thread
            thread.turn.release()
            thread.join()
        return results

    def start(self, name: str, run: Work, *, end: Work) -> RankThread:
        """Takes the place of ``BackgroundThread``: the thread belongs to the rank that makes it."""
        return self._begin(self.rank, run)

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Gives the turn away until it is so."""
        self._wait(is_so, math.inf)

    def stop(self, rank: Hashable) -> None:
        """Its threads do nothing until it goes on."""
        self.stopped.add(rank)
        if rank == self.rank:
            self._wait(lambda: True, 0)

    def go_on(self, rank: Hashable) -> None:
        self.stopped.discard(rank)

    def kill(self, rank: Hashable) -> None:
        """Its threads do nothing any more."""
        self.dead.add(rank)
        if rank == self.rank:
            raise Killed

    def pass_on(self) -> None:
        """Lets the thread run whose turn it is next."""
        if self._is_over.is_set():
            return
        waiting = [thread for thread in self.threads if thread.ended_at is None and self._is_active(thread)]
        ready = next((thread for thread in waiting if thread.is_so()), None)
        chosen = ready or min(waiting, key=lambda thread: thread.due, default=None)
        if chosen is None or (ready is None and chosen.due == math.inf):
            self._is_over.set()
            return
        if ready is None:
            self.seconds = max(self.seconds, chosen.due)
        self.threads.remove(chosen)
        self.threads.append(chosen)
        self.running = chosen
        chosen.turn.release()

    def _begin(self, rank: Hashable, work: Work) -> RankThread:
        thread = RankThread(self, rank, work)
        self.threads.append(thread)
        thread.start()
        return thread

    def _is_active(self, thread: RankThread) -> bool:
        return thread.rank not in self.stopped | self.dead

    def _wait(self, is_so: Callable[[], object], seconds: float) -> bool:
        thread = self.running
        assert thread is not None, "outside of FakeClock.run"
        if thread.rank in self.dead:  # what it does on its way out
            raise Killed
        thread.is_so, thread.due = is_so, self.seconds + seconds
        self.pass_on()
        thread.turn.acquire()
        if thread.rank in self.dead:
            raise Killed
        return bool(is_so())

    def _wait_for(self, condition: threading.Condition, is_so: Callable[[], object], seconds: float) -> bool:
        condition.release()
        try:
            return self._wait(is_so, seconds)
        finally:
            condition.acquire()


def for_ranks(function: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this clock for the test and its ranks; the real one for other threads of the process, such as the
    heartbeat of a lock that an earlier test has left."""

    def call(*arguments: Any) -> Any:
        thread = threading.current_thread()
        is_of_the_test = isinstance(thread, RankThread) or thread is threading.main_thread()
        return (function if is_of_the_test else real)(*arguments)

    return call


def has_ended(thread: Any) -> bool:
    return thread.ended_at is not None if isinstance(thread, RankThread) else not thread.is_alive()
