"""Finds the rank that holds up the collectives of a save or load, with the same answer on every rank.

A backend says at best "connection closed by peer", to the neighbours of a rank that died; about a rank that sleeps or
was stopped it says nothing. So every wait has a deadline, and each rank has a thread that reads one key of the process
group's store about once a second: has a rank given up? A rank that gives up sets this key. All threads answer in the
store where their ranks stand, the rank that gave up counts the answers and writes the verdict, and all ranks raise it:

    rank 0, 2: waited too long --> call --> answers of 0, 2 (waiting) --> verdict: rank 1 did not answer
    rank 1:    stopped                      ...goes on later, finds the verdict, raises the same

A verdict stays in the store: collectives of such a group may be under way still, so it serves no save or load again.

In a phase whose work itself waits for other ranks, as in the exchange of a transfer, a rank that fails must not go on
to the end of the phase while others wait for it: its collective could meet what they expect. It announces its error in
the store, all threads answer there when their ranks have come out of the work, and then all ranks end the phase:

    rank 0, 2: in the work ............ waited too long --> out --> end of the phase: the error of rank 1
    rank 1:    failed --> announced ... waits for all to be out --> end of the phase

A deadline begins when a rank has done its own part of a phase: writing for an hour is no fault where all ranks do.

Operations on one group take turns (``Turn``), in the order in which they began. A save in a thread and the next save
would otherwise mix their collectives. All ranks begin operations in one order, so all take the same turns.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from torchtitan_ext.errors import LostRankError
from torchtitan_ext.threads import BackgroundThread

# Between two questions of a rank to the store. Ranks take 0.75 to 1.25 of it, by their numbers, so that thousands of
# them do not ask at once.
_POLL_SECONDS = 1.0

# A thread learns of a call with its next question, and answers late while other code holds Python's lock.
_ROLL_CALL_SECONDS = 5.0
ANSWER_POLL_SECONDS = 0.1

# So much longer than the caller all others wait before one of them writes the verdict in its place.
TAKE_OVER_SECONDS = 2.0

# How long the rank that hosts the store stays for others that have to read the verdict.
_LINGER_SECONDS = 3.0

# An answer of the store that is older may be from before this process was stopped.
_FRESH_SECONDS = 3.0

# How often a waiting rank looks up. The end of a collective wakes it at once.
_WAIT_SLICE = timedelta(seconds=0.2)

# Between two looks at a collective on a device, at most. Short collectives take less than a millisecond.
_LONGEST_SLEEP_SECONDS = 0.01

_CALL, _VERDICT, _HEARD = "call", "verdict", "heard"
ADVICE = "this process group can serve no further save or load: make a new one, or restart"
_ADVICE_ON_TRANSFERS = "this process group can serve no further transfer: make a new one and plan again, or restart"

# The stores with ``clone`` and ``check``.
_ASKED_STORES = (dist.TCPStore, dist.FileStore, dist.HashStore)  # type: ignore[attr-defined]

# Collectives that were given up, with their tensors, into which the backend may still write when all else has ended:
# therefore in the module. Any thread may add and discard entries, in one step each.
_unfinished: set[tuple[dist.Work, tuple[torch.Tensor, ...]]] = set()

# The collectives that ended last, one for each of the two threads that gloo has in a group. Such a thread lets go of a
# collective only after it has told that it is done. Whoever lets go last frees the tensors: a thread of gloo needs
# Python's lock for that, and aborts the process where Python ends meanwhile. So it must not be the last.
_ended: deque[dist.Work] = deque(maxlen=2)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: the phase, what ranks do in it, since when, at work or waiting, at which key if known."""

    phase: str
    doing: str
    since: float
    is_at_work: bool = True
    key: str = ""


@dataclass
class _Exchange:
    """Work of a phase that waits for other ranks.

    Attributes:
        name: Of no other such work on the group, the same on all ranks.
        is_out: Whether this rank has come out of it.
        own_error: What it raised on this rank.
        failure: The rank that failed first, by its position in the group, and its error, as announced.
        all_are_out: Whether all ranks have come out of it, as this rank knows if it failed.
    """

    name: str
    is_out: bool = False
    own_error: BaseException | None = None
    failure: tuple[int, BaseException] | None = None
    all_are_out: bool = False


class Watch:
    """Watches over the ranks of a group during one operation. One thread uses it; a thread of its own asks the store.

    A rank waits ``timeout_seconds`` for others in one phase, its own part done.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup, *, path: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._operation = operation
        self._path = path
        self._group = group
        self._rank = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._store = _get_default_store()
        self._prefix = f"torchtitan_ext/watch/{group.group_name}"
        self._standing = Standing("", "it began; nothing was changed", time.monotonic())
        self._deadline: float | None = None
        # All below is guarded by the condition.
        self._changed = threading.Condition()
        self._reason: tuple[str, bool] | None = None
        self._last_quiet = float("-inf")
        self._verdict: LostRankError | None = None
        self._store_error: Exception | None = None
        self._is_asked = False
        self._is_closed = False
        self._exchange: _Exchange | None = None
        self._thread: threading.Thread | None = None
        self.start_error: RuntimeError | None = None
        """Why there is no thread: for the first phase, which tells all ranks."""
        try:
            if can_be_asked(self._store):
                self._thread = BackgroundThread("torchtitan_ext.watch", self._run, end=self._ask_to_end)
        except RuntimeError as error:
            self.start_error = error
        except BaseException as error:  # an interrupt: the thread has begun
            self.leave(error)
            raise

    def close(self) -> None:
        """Ends the thread. A thread that hangs in its store is left behind."""
        self._ask_to_end()
        if self._thread is not None:
            self._thread.join(_LINGER_SECONDS)

    def _ask_to_end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def begin(self, phase: str, doing: str) -> None:
        """From now on this rank works in a phase; the deadline counts from its first wait in it."""
        self._standing = Standing(phase, doing, time.monotonic())
        self._deadline = None
        with self._changed:
            self._exchange = None

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
                # The thread and the store get their first turn late where all processors are busy, which is no fault
                # before the deadline.
                is_first = self._last_quiet == float("-inf")
                longest = max(self._patience, self.timeout_seconds) if is_first else self._patience
                self._changed.wait_for(lambda: self._last_quiet >= needed or self._has_ended, longest)
            if self._verdict is not None:
                raise self._verdict
            if self._last_quiet == float("-inf"):
                raise self._lost_store() from self._store_error

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
            elif work is not None:
                outlast(work)

    def enter_exchange(self, name: str) -> None:
        """From now on this rank's work in the phase waits for other ranks. Not collective.

        Args:
            name: Of no other such work on the group, the same on all ranks.
        """
        with self._changed:
            self._exchange = None if self._thread is None else _Exchange(name)

    def leave_exchange(self, error: BaseException | None) -> bool:
        """Ends that work on this rank. Where it raised an error, returns when all ranks have come out of theirs.

        Returns:
            Whether the error follows from that of another rank, which was announced before.
        """
        with self._changed:
            if self._exchange is None:
                return False
            exchange, is_echo = self._exchange, self._exchange.failure is not None
            exchange.is_out, exchange.own_error = True, error
            if error is not None:
                self._changed.notify_all()
                # Ranks that wait for this one in vain come out when their own time is up.
                longest = self.timeout_seconds + self._patience
                self._changed.wait_for(lambda: exchange.all_are_out or self._has_ended, longest)
            return is_echo

    @property
    def announced(self) -> tuple[int, BaseException] | None:
        """The position of the rank whose work failed first in this phase, and its error, where it was announced."""
        with self._changed:
            return None if self._exchange is None else self._exchange.failure

    @property
    def advice(self) -> str:
        """What to do with a group that is lost."""
        return ADVICE if self._operation in ("save", "load") else _ADVICE_ON_TRANSFERS

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
    def _patience(self) -> float:
        """Seconds after which a silent store counts as lost."""
        return _ROLL_CALL_SECONDS + 2 * TAKE_OVER_SECONDS

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
            if lost_at is not None and time.monotonic() > lost_at + TAKE_OVER_SECONDS:
                raise self._lost_store() from self._store_error
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
        raise self._lost_store() from self._store_error

    def _say_why(self, why: str, *, is_late: bool) -> None:
        with self._changed:
            self._reason = (why, is_late)
            self._changed.notify_all()

    def _lost_store(self) -> LostRankError:
        """One error for a server that is stopped and does not answer, and one that died and broke the connection.

        What the store said is different on each rank: it is the cause of the error.
        """
        why, silent = where_the_store_was(self._store)
        return self._error(None, silent, why)

    def _error(self, rank: int | None, silent: tuple[int, ...], why: str) -> LostRankError:
        doing, phase = self._standing.doing, self._standing.phase
        reason = f"{why}; {self.advice}"
        return LostRankError(
            self._operation, doing, rank, silent, reason, step=phase, path=self._path, was_asked=bool(silent)
        )

    def _run(self) -> None:
        """The thread: asks until there is a verdict, or the operation ends. It waits for the store's answers alone."""
        try:
            cloned = take_clone(self._group, self._store)
            store = PrefixStore(self._prefix, cloned)
            while not self._is_closed or self._reason is not None:
                asked = time.monotonic()
                self._share_failures(store)
                if self._reason is not None or store.check([_CALL]):
                    verdict = self._roll_call(store)
                    self._share_failures(store)
                    self._hear(verdict)
                    self._linger(store)
                    return
                with self._changed:
                    self._last_quiet = asked
                    self._is_asked = False
                    self._changed.notify_all()
                    self._changed.wait_for(self._has_work, self._interval)
            give_back_clone(self._group, cloned)
        except (RuntimeError, ValueError) as error:
            with self._changed:
                self._store_error = error
                self._changed.notify_all()

    @property
    def _interval(self) -> float:
        """Seconds between two questions to the store."""
        if self._exchange is not None and self._exchange.failure is not None:
            return ANSWER_POLL_SECONDS
        return poll_seconds(self._rank)

    def _has_work(self) -> bool:
        has_error = self._exchange is not None and self._exchange.own_error is not None
        is_untold = has_error and self._exchange is not None and self._exchange.failure is None
        return self._is_closed or self._is_asked or self._reason is not None or is_untold

    def _share_failures(self, store: Store) -> None:
        """Announces this rank's error, hears of those of others, and tells and hears who has come out of the work."""
        with self._changed:
            exchange = self._exchange
        if exchange is None:
            return
        key = f"failed/{exchange.name}"
        if exchange.own_error is not None and exchange.failure is None:
            store.compare_set(key, "", pickle.dumps((self._ranks.index(self._rank), exchange.own_error)).hex())
        if exchange.failure is None and store.check([key]):
            failure = pickle.loads(bytes.fromhex(store.get(key).decode()))
            with self._changed:
                exchange.failure = failure
                if self._deadline is not None:  # others come out when their time is up, and it began later
                    self._deadline = time.monotonic() + self.timeout_seconds + self._patience
        if exchange.failure is not None and exchange.is_out:
            store.set(f"out/{exchange.name}/{self._rank}", "")
        if exchange.own_error is not None and store.check([f"out/{exchange.name}/{rank}" for rank in self._ranks]):
            with self._changed:
                exchange.all_are_out = True
                self._changed.notify_all()

    def _hear(self, verdict: dict[str, Any]) -> None:
        with self._changed:
            self._verdict = LostRankError(
                verdict["operation"],
                verdict["doing"],
                None,
                tuple(verdict["silent"]),
                f"{verdict['why']}; {self.advice}",
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
        deadline = time.monotonic() + _ROLL_CALL_SECONDS + (0 if is_caller else TAKE_OVER_SECONDS)
        while not store.check([_VERDICT]):
            if (is_caller and store.check(answers)) or time.monotonic() > deadline:
                store.compare_set(_VERDICT, "", json.dumps(self._count(store, call)))
                break
            time.sleep(ANSWER_POLL_SECONDS)
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
        """The verdict: ranks that are silent, and ranks that the caller waited for in vain."""
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
            time.sleep(ANSWER_POLL_SECONDS)
            num_heard = store.add(_HEARD, 0)


def poll_seconds(rank: int) -> float:
    """Seconds between two questions of a rank to the store while nothing happens."""
    return _POLL_SECONDS * (0.75 + 0.5 * (rank * 0.618034 % 1))


# The clones of stores that no operation uses now, by group: a thread needs a store of its own, since another one may
# wait in the shared one, and blocks it meanwhile. They are kept: each new clone of a TCPStore is a connection, and each
# new one of a FileStore reads the whole file, to which it also writes. Changed only under the lock.
_idle_clones: WeakKeyDictionary[dist.ProcessGroup, list[Store]] = WeakKeyDictionary()


def take_clone(group: dist.ProcessGroup, store: Store) -> Store:
    """A store for one thread, until it gives it back."""
    with _changing:
        idle = _idle_clones.setdefault(group, [])
        kept = idle.pop() if idle else None
    return store.clone() if kept is None else kept  # type: ignore[attr-defined]


def give_back_clone(group: dist.ProcessGroup, store: Store) -> None:
    """Takes only a clone that has failed in nothing."""
    with _changing:
        _idle_clones.setdefault(group, []).append(store)


def where_the_store_was(store: Store) -> tuple[str, tuple[int, ...]]:
    """Of a store that is lost, for errors: who hosted it, and the ranks that are lost with it."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(inner, dist.FileStore):  # type: ignore[attr-defined]
        return f"the store of the process groups, the file {getattr(inner, 'path', '')}, is lost", ()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the store of the process groups, which the launcher's agent on the first node hosts, is lost", ()
    return "the store of the process groups, which rank 0 hosts, is lost", (0,)


def outlast(work: dist.Work) -> None:
    """Keeps a collective that is done until the backend's thread has let go of it, and with it its tensors."""
    _ended.append(work)


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
