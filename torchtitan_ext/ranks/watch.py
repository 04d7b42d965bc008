"""Finds the rank that holds up the collectives of a save or load, with the same answer on every rank.

A backend says at best "connection closed by peer", to the neighbours of a rank that died; about a rank that sleeps or
was stopped it says nothing. So every wait has a deadline, and each rank has a thread that reads one key of the process
group's store about once a second: has a rank given up? A rank that gives up sets this key. All threads answer in the
store where their ranks stand, the rank that gave up counts the answers and writes the verdict, and all ranks raise it:

    rank 0, 2: waited too long --> call --> answers of 0, 2 (waiting) --> verdict: rank 1 did not answer
    rank 1:    stopped                      ...goes on later, finds the verdict, raises the same

A verdict stays in the store: collectives of such a group may be under way still, so it serves no save or load again.

A deadline begins when a rank has done its own part of a phase: writing for an hour is no fault where all ranks do.

Operations on one group take turns (``Turn``), in the order in which they began. A save in a thread and the next save
would otherwise mix their collectives. All ranks begin operations in one order, so all take the same turns.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks.groups import meeting_address, members_text, own_rank, ranks_of, store_of

# Between two questions of a rank to the store. Ranks take 0.75 to 1.25 of it, by their numbers, so that thousands of
# them do not ask at once.
_POLL_SECONDS = 1.0

# A thread learns of a call with its next question, and answers late while other code holds Python's lock.
_ROLL_CALL_SECONDS = 5.0
_ANSWER_POLL_SECONDS = 0.1

# So much longer than the caller all others wait before one of them writes the verdict in its place.
_TAKE_OVER_SECONDS = 2.0

# How long the rank that hosts the store stays for others that have to read the verdict.
_LINGER_SECONDS = 3.0

# An answer of the store that is older may be from before this process was stopped.
_FRESH_SECONDS = 3.0

# How often a waiting rank looks up. The end of a collective wakes it at once.
_WAIT_SLICE = timedelta(seconds=0.2)

# Between two looks at a collective on a device, at most. Short collectives take less than a millisecond.
_LONGEST_SLEEP_SECONDS = 0.01

_CALL, _VERDICT, _HEARD = "call", "verdict", "heard"
_ADVICE = "this process group can serve no further save or load: make a new one, or restart"
_ADVICE_ON_TRANSFERS = "this process group can serve no further transfer: make a new one and plan again, or restart"
_ADVICE_ON_MEETINGS = "this process group can serve no further transfer: meet again, and plan again"

# The stores with ``clone`` and ``check``.
_ASKED_STORES = (dist.TCPStore, dist.FileStore, dist.HashStore)  # type: ignore[attr-defined]

# Collectives that were given up, with their tensors, into which the backend may still write when all else has ended:
# therefore in the module. Any thread may add and discard entries, in one step each.
_unfinished: set[tuple[dist.Work, tuple[torch.Tensor, ...]]] = set()


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: the phase, what ranks do in it, since when, at work or waiting, at which key if known."""

    phase: str
    doing: str
    since: float
    is_at_work: bool = True
    key: str = ""


class Watch:
    """Watches over the ranks of a group during one operation. One thread uses it; a thread of its own asks the store.

    A rank waits ``timeout_seconds`` for others in one phase, its own part done.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup, *, path: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._operation = operation
        self._path = path
        self._group = group
        self._rank = own_rank(group)
        self._ranks = ranks_of(group)
        self._store = store_of(group)
        self._prefix = f"torchtitan_ext/watch/{group.group_name}"
        self._standing = Standing("", "", time.monotonic())
        self._deadline: float | None = None
        # All below is guarded by the condition.
        self._changed = threading.Condition()
        self._reason: tuple[str, bool] | None = None
        self._last_quiet = float("-inf")
        self._verdict: LostRankError | None = None
        self._store_error: str | None = None
        self._is_asked = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if can_be_asked(self._store):
            self._thread = threading.Thread(target=self._run, name="torchtitan_ext.watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. A thread that hangs in its store is left behind."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LINGER_SECONDS)

    def begin(self, phase: str, doing: str) -> None:
        """From now on this rank works in a phase; the deadline counts from its first wait in it."""
        self._standing = Standing(phase, doing, time.monotonic())
        self._deadline = None

    def at(self, key: str) -> None:
        """From now on this rank works on this key of the phase."""
        self._standing = replace(self._standing, key=key)

    def check(self) -> None:
        """Raises the verdict, if there is one by now."""
        with self._changed:
            if self._verdict is not None:
                raise self._verdict

    def confirm(self) -> None:
        """Raises the verdict, if there is one. Asks the store if its last answer is old, as after a stopped process."""
        if self._thread is None:
            return
        needed = time.monotonic() - _FRESH_SECONDS
        with self._changed:
            if self._last_quiet < needed:
                self._is_asked = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._last_quiet >= needed or self._has_ended, self._patience)
            if self._verdict is not None:
                raise self._verdict
            if self._last_quiet == float("-inf"):
                raise self._lost_store()

    def wait_for(self, start: Callable[[], dist.Work], *buffers: torch.Tensor) -> None:
        """Starts a collective and returns when it is done.

        Raises:
            LostRankError: It failed, or lasted beyond the deadline, or another rank gave up. The same on every rank.
        """
        self.check()
        self._standing = replace(self._standing, is_at_work=False)
        if self._deadline is None:
            self._deadline = time.monotonic() + self.timeout_seconds
        work = None
        try:
            work = start()
            self._wait(work, buffers[0].device)
        except RuntimeError as error:
            if isinstance(error, LostRankError):
                raise
            self._give_up(f"the backend of rank {self._rank} says: {error}")
        finally:
            _unfinished.difference_update([kept for kept in tuple(_unfinished) if kept[0].is_completed()])
            if work is not None and not work.is_completed():
                _unfinished.add((work, buffers))

    def leave(self, error: BaseException) -> None:
        """Tells the others that this rank takes no further part, as after an interrupt."""
        self._say_why(f"rank {self._rank} left: {type(error).__name__}", is_late=False)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.timeout_seconds if self._deadline is None else self._deadline - time.monotonic()

    @property
    def _has_ended(self) -> bool:
        return self._verdict is not None or self._store_error is not None

    @property
    def _advice(self) -> str:
        if meeting_address(self._group) is not None:
            return _ADVICE_ON_MEETINGS
        return _ADVICE if self._operation in ("save", "load") else _ADVICE_ON_TRANSFERS

    @property
    def _patience(self) -> float:
        """Seconds after which a silent store counts as lost."""
        return _ROLL_CALL_SECONDS + 2 * _TAKE_OVER_SECONDS

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        lost_at: float | None = None
        is_done = _is_done if device.type == "cpu" else _is_done_on_device
        while not is_done(work):
            with self._changed:
                if self._verdict is not None:
                    raise self._verdict
                if self._store_error is not None and lost_at is None:
                    lost_at = time.monotonic()
            # The rank that hosts the store ends it when it has finished; what it sent may still be on its way.
            if lost_at is not None and time.monotonic() > lost_at + _TAKE_OVER_SECONDS:
                raise self._lost_store()
            if self.seconds_left < 0:
                self._give_up(f"rank {self._rank} waited {self.timeout_seconds:g} s (timeout_seconds)", is_late=True)

    def _give_up(self, why: str, *, is_late: bool = False) -> None:
        if self._thread is None:  # ranks that cannot ask each other each say what they know
            others = tuple(rank for rank in self._ranks if rank != self._rank)
            why = f"{why}; ranks cannot be asked through the store of these process groups"
            raise self._error(self._rank, others, why)
        self._say_why(why, is_late=is_late)
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, self._patience)
            if self._verdict is not None:
                raise self._verdict
        raise self._lost_store()

    def _say_why(self, why: str, *, is_late: bool) -> None:
        with self._changed:
            self._reason = (why, is_late)
            self._changed.notify_all()

    def _lost_store(self) -> LostRankError:
        """One error for a server that is stopped and does not answer, and one that died and broke the connection."""
        is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        silent = () if is_of_agent else (0,)
        host = "the launcher's agent on the first node hosts" if is_of_agent else "rank 0 hosts"
        address = meeting_address(self._group)
        if address is not None:
            return self._error(None, (), f"the store of the meeting at {address} is lost")
        return self._error(None, silent, f"the store of the process groups, which {host}, is lost")

    def _error(self, rank: int | None, silent: tuple[int, ...], why: str) -> LostRankError:
        doing, phase = self._standing.doing, self._standing.phase
        return LostRankError(
            self._operation, doing, rank, silent, f"{why}; {self._advice}", step=phase, path=self._path
        )

    def _run(self) -> None:
        """The thread: asks until there is a verdict, or the operation ends. It waits for the store's answers alone."""
        interval = _POLL_SECONDS * (0.75 + 0.5 * (self._rank * 0.618034 % 1))
        try:
            # A store of its own: another thread may wait in the shared one, and blocks it meanwhile.
            store = PrefixStore(self._prefix, self._store.clone())  # type: ignore[attr-defined]
            while not self._is_closed or self._reason is not None:
                asked = time.monotonic()
                if self._reason is not None or store.check([_CALL]):
                    self._hear(self._roll_call(store))
                    self._linger(store)
                    return
                with self._changed:
                    self._last_quiet = asked
                    self._is_asked = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed or self._is_asked or self._reason, interval)
        except (RuntimeError, ValueError) as error:
            with self._changed:
                self._store_error = str(error)
                self._changed.notify_all()

    def _hear(self, verdict: dict[str, Any]) -> None:
        members = members_text(self._group, verdict["silent"])
        why = f"{verdict['why']}; {members}" if members else verdict["why"]
        with self._changed:
            self._verdict = LostRankError(
                verdict["operation"],
                verdict["doing"],
                None,
                tuple(verdict["silent"]),
                f"{why}; {self._advice}",
                step=verdict["phase"],
                path=verdict["path"],
                late={int(rank): text for rank, text in verdict["late"].items()},
            )
            self._changed.notify_all()

    def _roll_call(self, store: Store) -> dict[str, Any]:
        """Answers the call and waits for the caller's verdict; makes the verdict if the caller is lost too."""
        if self._reason is not None:
            store.compare_set(_CALL, "", json.dumps(self._call(*self._reason)))
        call = json.loads(store.get(_CALL))
        store.set(f"answer/{self._rank}", json.dumps(self._answer()))
        answers = [f"answer/{rank}" for rank in self._ranks]
        is_caller = call["rank"] == self._rank
        deadline = time.monotonic() + _ROLL_CALL_SECONDS + (0 if is_caller else _TAKE_OVER_SECONDS)
        while not store.check([_VERDICT]):
            if (is_caller and store.check(answers)) or time.monotonic() > deadline:
                store.compare_set(_VERDICT, "", json.dumps(self._count(store, call)))
                break
            time.sleep(_ANSWER_POLL_SECONDS)
        verdict: dict[str, Any] = json.loads(store.get(_VERDICT))
        return verdict

    def _call(self, why: str, is_late: bool) -> dict[str, Any]:
        standing = self._standing
        return {
            "rank": self._rank,
            "operation": self._operation,
            "path": self._path,
            "phase": standing.phase,
            "doing": standing.doing,
            "why": why,
            "is_late": is_late,
        }

    def _answer(self) -> dict[str, Any]:
        standing = self._standing
        key = f"{standing.key}, " if standing.key else ""
        seconds = time.monotonic() - standing.since
        return {"is_at_work": standing.is_at_work, "text": f"{standing.phase}, {key}for {seconds:.0f} s"}

    def _count(self, store: Store, call: dict[str, Any]) -> dict[str, Any]:
        """The verdict: the ranks that are silent, and those that the caller waited for in vain."""
        present = [rank for rank in self._ranks if store.check([f"answer/{rank}"])]
        answers = {rank: json.loads(store.get(f"answer/{rank}")) for rank in present}
        late = {rank: answer["text"] for rank, answer in answers.items() if call["is_late"] and answer["is_at_work"]}
        silent = [rank for rank in self._ranks if rank not in answers]
        return {**call, "silent": silent, "late": late, "num_answers": len(answers)}

    def _linger(self, store: Store) -> None:
        """Keeps rank 0, which hosts the store, until all ranks that answered have read the verdict."""
        num_heard = store.add(_HEARD, 1)
        if self._rank != 0:
            return
        num_answers = json.loads(store.get(_VERDICT))["num_answers"]
        deadline = time.monotonic() + _LINGER_SECONDS
        while num_heard < num_answers and time.monotonic() < deadline:
            time.sleep(_ANSWER_POLL_SECONDS)
            num_heard = store.add(_HEARD, 0)


def can_be_asked(store: Store | None) -> bool:
    """Whether ranks can ask each other: MPI has no store, and a store written in Python may lack what it takes."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    return isinstance(inner, _ASKED_STORES)


def _is_done(work: dist.Work) -> bool:
    """Waits a slice of time. Raises what went wrong."""
    try:
        work.wait(_WAIT_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended between the two calls.
        work.wait()
    return True


def _is_done_on_device(work: dist.Work) -> bool:
    """A timed wait of NCCL that ends by its time destroys the communicator: the work is only asked."""
    seconds = 1e-4
    deadline = time.monotonic() + _WAIT_SLICE.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_SLEEP_SECONDS)
    work.wait()
    return True


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
