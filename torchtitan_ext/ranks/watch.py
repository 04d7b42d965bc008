"""Finds the rank that holds up the collectives of a save or load, with the same answer on every rank.

A backend says at best "connection closed by peer", to the neighbours of a rank that died; about a rank that sleeps or
was stopped it says nothing. So every wait has a deadline, and each rank has a thread that asks the store of the process
group about once a second whether a rank has given up. A rank that gives up calls the roll (csrc/core/roll_call.h):

    rank 0, 2: waited too long --> call --> answers of 0, 2 (waiting) --> verdict: rank 1 did not answer
    rank 1:    stopped                      ...goes on later, finds the verdict, raises the same

A verdict stays in the store: collectives of such a group may be under way still, so it serves no save or load again.

In a phase whose work itself waits for other ranks, as in the exchange of a transfer, a rank that fails must not go on
to the end of the phase while others wait for it: its collective could meet what they expect. It announces its error in
the store, all threads answer there when their ranks have come out of the work, and then all ranks end the phase:

    rank 0, 2: in the work ............ waited too long --> out --> end of the phase: the error of rank 1
    rank 1:    failed --> announced ... waits for all to be out --> end of the phase

A deadline begins when a rank has done its own part of a phase: writing for an hour is no fault where all ranks do.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from torchtitan_ext import clock
from torchtitan_ext._core import RollCall, StoreAction
from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks.stores import can_be_asked, give_back_clone, take_clone, where_the_store_was
from torchtitan_ext.threads import BackgroundThread

# How long the rank that calls waits for answers: of ranks that hear of a call with their next question, and answer late
# while other code holds Python's lock.
_ANSWER_SECONDS = 5.0

# How often a waiting rank looks up. The end of a collective wakes it at once.
_WAIT_SLICE = timedelta(seconds=0.2)

# Between two looks at a collective on a device, at most. Short collectives take less than a millisecond.
_LONGEST_SLEEP_SECONDS = 0.01

ADVICE = "this process group can serve no further save or load: make a new one, or restart"
_ADVICE_ON_TRANSFERS = "this process group can serve no further transfer: make a new one and plan again, or restart"

# Collectives that were given up, with their tensors, into which the backend may still write when all else has ended:
# therefore in the module. Any thread may add and discard entries, in one step each.
_unfinished: set[tuple[dist.Work, tuple[torch.Tensor, ...]]] = set()

# The collectives that ended last, one for each of the two threads that gloo has in a group. Such a thread lets go of a
# collective only after it has told that it is done. Whoever lets go last frees the tensors: a thread of gloo needs
# Python's lock for that, and aborts the process where Python ends meanwhile. So it must not be the last.
_ended: deque[dist.Work] = deque(maxlen=2)


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
        # All below is guarded by the condition.
        self._changed = threading.Condition()
        self._roll_call = RollCall(
            operation, path, self._rank, self._ranks, timeout_seconds, clock.now(), _ANSWER_SECONDS
        )
        self._verdict: LostRankError | None = None
        self._store_error: Exception | None = None
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
            clock.join(self._thread, RollCall.LINGER_SECONDS)

    def _ask_to_end(self) -> None:
        with self._changed:
            self._roll_call.close()
            self._changed.notify_all()

    def begin(self, phase: str, doing: str) -> None:
        """From now on this rank works in a phase; the deadline counts from its first wait in it."""
        with self._changed:
            self._roll_call.begin(clock.now(), phase, doing)

    def at(self, key: str) -> None:
        """From now on this rank works on this key of the phase."""
        with self._changed:
            self._roll_call.at(key)

    def check(self) -> None:
        """Raises the verdict, if there is one by now."""
        with self._changed:
            if self._verdict is not None:
                raise self._verdict

    def confirm(self) -> None:
        """Raises the verdict, if there is one. Asks the store if its last answer is old, as after a stopped process."""
        if self._thread is None:
            return
        now = clock.now()
        with self._changed:
            if not self._roll_call.is_fresh(now):
                self._changed.notify_all()
                longest = self._roll_call.patience_seconds
                # The thread and the store get their first turn late where all processors are busy, which is no fault
                # before the deadline.
                if not self._roll_call.has_answered:
                    longest = max(longest, self.timeout_seconds)
                clock.wait_for(self._changed, lambda: self._roll_call.is_fresh(now) or self._has_ended, longest)
            if self._verdict is not None:
                raise self._verdict
            if not self._roll_call.has_answered:
                raise self._lost_store() from self._store_error

    def wait_for(self, start: Callable[[], dist.Work], *buffers: torch.Tensor) -> None:
        """Starts a collective and returns when it is done.

        Raises:
            LostRankError: It failed, or lasted beyond the deadline, or another rank gave up. The same on every rank.
        """
        self.check()
        with self._changed:
            self._roll_call.wait(clock.now())
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
        if self._thread is not None:
            with self._changed:
                self._roll_call.enter_exchange(name)

    def leave_exchange(self, error: BaseException | None) -> bool:
        """Ends that work on this rank. Where it raised an error, returns when all ranks have come out of theirs.

        Returns:
            Whether the error follows from that of another rank, which was announced before.
        """
        if self._thread is None:
            return False
        with self._changed:
            is_echo = self._roll_call.leave_exchange(None if error is None else pickle.dumps(error))
            if error is not None:
                self._changed.notify_all()
                # Ranks that wait for this one in vain come out when their own time is up.
                longest = self.timeout_seconds + self._roll_call.patience_seconds
                clock.wait_for(self._changed, lambda: self._roll_call.all_are_out or self._has_ended, longest)
            return is_echo

    @property
    def announced(self) -> tuple[int, BaseException] | None:
        """The position of the rank whose work failed first in this phase, and its error, where it was announced."""
        with self._changed:
            failure = self._roll_call.failure
        return None if failure is None else (failure[0], pickle.loads(failure[1]))

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
        return self._roll_call.seconds_left(clock.now())

    @property
    def _has_ended(self) -> bool:
        return self._verdict is not None or self._store_error is not None

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        lost_at: float | None = None
        is_done = _is_done if device.type == "cpu" else _is_done_on_device
        while not is_done(work):
            with self._changed:
                if self._verdict is not None:
                    raise self._verdict
                if self._store_error is not None and lost_at is None:
                    lost_at = clock.now()
            # The rank that hosts the store ends it when it has finished; what it sent may still be on its way.
            if lost_at is not None and clock.now() > lost_at + RollCall.TAKE_OVER_SECONDS:
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
            clock.wait_for(self._changed, lambda: self._has_ended, self._roll_call.patience_seconds)
            if self._verdict is not None:
                raise self._verdict
        raise self._lost_store() from self._store_error

    def _say_why(self, why: str, *, is_late: bool) -> None:
        with self._changed:
            self._roll_call.call(why, is_late)
            self._changed.notify_all()

    def _lost_store(self) -> LostRankError:
        """One error for a server that is stopped and does not answer, and one that died and broke the connection.

        What the store said is different on each rank: it is the cause of the error.
        """
        why, silent = where_the_store_was(self._store)
        return self._error(None, silent, why)

    def _error(self, rank: int | None, silent: tuple[int, ...], why: str) -> LostRankError:
        doing, phase = self._roll_call.doing, self._roll_call.phase
        reason = f"{why}; {self.advice}"
        return LostRankError(
            self._operation, doing, rank, silent, reason, step=phase, path=self._path, was_asked=bool(silent)
        )

    def _run(self) -> None:
        """The thread: asks until there is a verdict, or the operation ends. It waits for the store's answers alone."""
        try:
            cloned = take_clone(self._group, self._store)
            store, seen = PrefixStore(self._prefix, cloned), None
            actions: list[StoreAction] = []
            while not actions or actions[-1].kind != "end":
                with self._changed:
                    actions = self._roll_call.next(clock.now(), seen)
                for action in actions:
                    if action.kind in ("raise", "wait"):
                        self._tell(action)
                    else:
                        seen = perform(action, store)
            if self._verdict is None:
                give_back_clone(self._group, cloned)
        except (RuntimeError, ValueError) as error:
            with self._changed:
                self._store_error = error
                self._changed.notify_all()

    def _tell(self, action: StoreAction) -> None:
        """Tells this rank what the thread has seen, and waits if it has to."""
        with self._changed:
            verdict = self._roll_call.verdict
            if verdict is not None and self._verdict is None:
                self._verdict = LostRankError(
                    verdict.operation,
                    verdict.doing,
                    None,
                    verdict.silent,
                    f"{verdict.why}; {self.advice}",
                    step=verdict.phase,
                    path=verdict.path,
                    late=verdict.late,
                )
            self._changed.notify_all()
            clock.wait_for(self._changed, self._roll_call.has_work, action.seconds)


Seen = bool | int | dict[str, bytes] | None
"""What an action sees in the store."""


def perform(action: StoreAction, store: Store) -> Seen:
    """Does with the store what a roll call says. Returns what it sees there.

    Stores take bytes, which their stubs leave out.
    """
    if action.kind == "set":
        store.set(action.keys[0], action.value)  # type: ignore[arg-type]
    elif action.kind == "compare_set":
        store.compare_set(action.keys[0], "", action.value)  # type: ignore[arg-type]
    elif action.kind == "add":
        return store.add(action.keys[0], action.number)
    elif action.kind == "has_all":
        return store.check(action.keys)
    elif action.kind == "read":
        return {key: store.get(key) for key in action.keys if store.check([key])}
    return None


def outlast(work: dist.Work) -> None:
    """Keeps a collective that is done until the backend's thread has let go of it, and with it its tensors."""
    _ended.append(work)


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
    deadline = clock.now() + _WAIT_SLICE.total_seconds()
    while not work.is_completed():
        if clock.now() > deadline:
            return False
        clock.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_SLEEP_SECONDS)
    work.wait()
    return True
