"""The step at which all ranks stop, agreed on beside training: nothing per step, and no message on the training group.

Ranks pass the boundary of a step at different times; the first stage of a pipeline may be steps ahead of the last. A
collective in each step would tell them of a request, and cost each step. Instead each rank has a thread that asks the
store about once a second whether there is a request. If there is one, it reports the last boundary that its rank has
passed, and from then on the rank passes no further one before the verdict. The coordinator posts the verdict when all
have reported: the largest one reported, plus one, which no rank can have passed.

    rank 0: passed 7 ................ reports 7, waits at 8 ..... verdict 9 | passes 8, stops at 9
    rank 1: passed 8 .. a request --> reports 8, waits at 9 .............. | stops at 9
    rank 2: passed 7, in a collective of step 8: reports 7 ............... | passes 8, stops at 9

Threads report, so no rank has to come out of a collective, in which it may wait for one that waits for the verdict. A
verdict is written once (``compare_set``) and never changes: all ranks read the same one, whoever wrote it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchtitan_ext.errors import LostRankError, WrongValueError
from torchtitan_ext.ranks.groups import position_in, ranks_of, store_of
from torchtitan_ext.ranks.watch import (
    ADVICE,
    ANSWER_POLL_SECONDS,
    TAKE_OVER_SECONDS,
    can_be_asked,
    give_back_clone,
    poll_seconds,
    take_clone,
    where_the_store_was,
)

_REQUEST, _VERDICT = "request", "verdict"

_AGREEING = "ranks agreed on the step to stop at"

# How long ``close`` waits for its thread, and how much longer than all others a rank waits that hears nothing at all.
_PATIENCE_SECONDS = 5.0

# How many objects a group has had: each has keys of its own. All ranks make them in one order.
_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Inbox(Protocol):
    """Where requests of this process arrive. Its thread calls ``wait``, any thread ``wake``."""

    def wait(self, seconds: float) -> str:
        """Returns what was requested and by what, or nothing after so many seconds, or when it was woken."""

    def wake(self) -> None:
        """Ends a ``wait``."""


def agreed_step(passed: Sequence[int]) -> int:
    """The first boundary that no rank has passed, where each has passed these and waits at its next one."""
    return max(passed) + 1


class Boundaries:
    """The boundaries of steps that this rank passes. All ranks of a group make one; ``close`` ends its thread.

    Args:
        group: ``None`` for a job of one process, without a store.
        inbox: Where requests of this rank arrive.
        describe: Called by the thread with the last boundary passed: what this rank reports for ``decide``, as JSON has it.
        decide: Called by the thread of the rank that writes the verdict, with the step, what all ranks have reported,
            and the seconds since the request: what the verdict says beside the step, as JSON has it.
        path: The run, for errors.
        timeout_seconds: How long after a request ranks may take to report.

    Raises:
        WrongValueError: The store of the group cannot be asked.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        inbox: Inbox,
        *,
        describe: Callable[[int], dict[str, Any]],
        decide: Callable[[int, list[dict[str, Any]], float], dict[str, Any]],
        path: str,
        timeout_seconds: float,
    ) -> None:
        self.ranks = [0] if group is None else ranks_of(group)
        self.position = 0 if group is None else position_in(group)
        self._group, self._inbox, self._describe, self._decide = group, inbox, describe, decide
        self._path, self._timeout_seconds = path, timeout_seconds
        self._store: Store = dist.HashStore() if group is None else store_of(group)
        if not can_be_asked(self._store):
            raise WrongValueError(
                f"CheckpointManager: got signals or grace_seconds, and ranks cannot be asked through a "
                f"{type(self._store).__name__}; use a group with a TCPStore or a FileStore"
            )
        self._prefix = "torchtitan_ext/boundaries"
        if group is not None:
            _numbers[group] = _numbers.get(group, 0) + 1
            self._prefix += f"/{group.group_name}/{_numbers[group]}"
        # All below is guarded by the condition, which no signal handler takes.
        self._changed = threading.Condition()
        self._passed = 0
        self._has_reported = self._is_closed = False
        self._verdict: dict[str, Any] | None = None
        self._store_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="torchtitan_ext.boundaries", daemon=True)
        self._thread.start()

    def pass_(self, step: int) -> dict[str, Any] | None:
        """Passes the boundary of a step. Waits only between this rank's report and the verdict.

        Returns:
            The verdict, if there is one: the ranks stop at the first boundary from its ``"step"`` on.

        Raises:
            LostRankError: Ranks have not reported in time. The same on every rank.
        """
        with self._changed:
            if self._has_reported and self._verdict is None:
                longest = self._timeout_seconds + TAKE_OVER_SECONDS + _PATIENCE_SECONDS
                self._changed.wait_for(lambda: self._verdict is not None or self._store_error is not None, longest)
                if self._verdict is None:
                    why, silent = where_the_store_was(self._group, self._store)
                    raise self._lost(f"{why}; {ADVICE}", silent, was_asked=False) from self._store_error
            if self._verdict is not None and "silent" in self._verdict:
                raise self._lost(self._verdict["why"], self._verdict["silent"], was_asked=True)
            self._passed = step
            return self._verdict if self._verdict is not None and "step" in self._verdict else None

    def restart(self, step: int) -> None:
        """This rank stands at another boundary, as after a resume."""
        with self._changed:
            self._passed = step

    def close(self) -> None:
        """From now on this rank passes no boundary. Others that ask later go on without a verdict."""
        with self._changed:
            self._is_closed = True
        self._inbox.wake()
        self._thread.join(_PATIENCE_SECONDS)

    def _lost(self, why: str, silent: Sequence[int], *, was_asked: bool) -> LostRankError:
        return LostRankError("save", _AGREEING, None, tuple(silent), why, path=self._path, was_asked=was_asked)

    def _run(self) -> None:
        """The thread."""
        try:
            own = self._store if self._group is None else take_clone(self._group, self._store)
            store = PrefixStore(self._prefix, own)
            seconds = poll_seconds(self.position)
            while not self._is_closed:
                why = self._inbox.wait(seconds)
                if self._verdict is None and (why or store.check([_REQUEST])):
                    self._agree(store, why)
            store.compare_set(_VERDICT, "", json.dumps({"closed": self.ranks[self.position]}))
            if self._group is not None:
                give_back_clone(self._group, own)
        except (RuntimeError, ValueError) as error:  # the store is lost, and with it the job
            with self._changed:
                self._store_error = error
                self._changed.notify_all()

    def _agree(self, store: Store, why: str) -> None:
        # A rank that was not asked itself has heard of it one question later at most.
        begun = time.monotonic() - (0 if why else poll_seconds(self.position))
        if why:
            store.compare_set(_REQUEST, "", f"{why} at rank {self.ranks[self.position]}")
        with self._changed:
            self._has_reported = True
            report = {**self._describe(self._passed), "passed": self._passed}
        store.set(_report_of(self.position), json.dumps(report))
        reports = [_report_of(position) for position in range(len(self.ranks))]
        is_coordinator = self.position == 0
        deadline = time.monotonic() + self._timeout_seconds + (0 if is_coordinator else TAKE_OVER_SECONDS)
        while not store.check([_VERDICT]):
            if time.monotonic() > deadline or (is_coordinator and store.check(reports)):
                store.compare_set(_VERDICT, "", json.dumps(self._count(store, begun)))
            else:
                time.sleep(ANSWER_POLL_SECONDS)
        verdict = json.loads(store.get(_VERDICT))
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def _count(self, store: Store, begun: float) -> dict[str, Any]:
        """The verdict: the step, or who has not reported."""
        why = store.get(_REQUEST).decode()
        present = [position for position in range(len(self.ranks)) if store.check([_report_of(position)])]
        silent = [rank for position, rank in enumerate(self.ranks) if position not in present]
        if silent:
            waited = f"rank {self.ranks[self.position]} waited {self._timeout_seconds:g} s for them after {why}"
            return {"silent": silent, "why": f"{waited}; {ADVICE}"}
        reports = [json.loads(store.get(_report_of(position))) for position in present]
        step = agreed_step([report["passed"] for report in reports])
        return {"step": step, "why": why, **self._decide(step, reports, time.monotonic() - begun)}


def _report_of(position: int) -> str:
    return f"report/{position}"
