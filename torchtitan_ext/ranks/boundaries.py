"""The step at which all ranks stop, agreed on beside training: nothing per step, and no message on the training group.

Ranks pass the boundary of a step at different times; the first stage of a pipeline may be steps ahead of the last. Each
rank has a thread that asks the store about once a second whether there is a request. If there is one, it reports the
last boundary that its rank has passed, and from then on the rank passes no further one before the verdict. The
coordinator posts the verdict when all have reported: the largest one reported, plus one, which no rank can have passed.

    rank 0: passed 7 ................ reports 7, waits at 8 ..... verdict 9 | passes 8, stops at 9
    rank 1: passed 8 .. a request --> reports 8, waits at 9 .............. | stops at 9
    rank 2: passed 7, in a collective of step 8: reports 7 ............... | passes 8, stops at 9

It is the threads that report, so no rank has to come out of a collective in which it waits for one that waits for the
verdict. A verdict is written once (``compare_set``): all ranks read the same one, whoever wrote it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from torchtitan_ext import clock
from torchtitan_ext._core import RollCall, poll_seconds
from torchtitan_ext.errors import LostRankError
from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.ranks.signal_inbox import SignalInbox
from torchtitan_ext.ranks.stores import give_back_clone, take_clone, where_the_store_was
from torchtitan_ext.ranks.watch import ADVICE
from torchtitan_ext.threads import BackgroundThread

_REQUEST, _VERDICT = "request", "verdict"

# How long this rank waits for its own thread, beyond what the thread waits for others.
_PATIENCE_SECONDS = 5.0

# How many objects a group has had: each has keys of its own. All ranks make them in one order.
_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

Json = dict[str, Any]


class Boundaries:
    """The boundaries of steps that this rank passes. All ranks of a group make one; ``close`` ends its thread.

    Args:
        group: One whose store can be asked; ``None`` for a job of one process.
        inbox: Where requests of this rank arrive.
        report: What this rank tells when it hears of a request, by the last boundary that it has passed.
        decide: The verdict, by what all ranks have told and the seconds since the request; with the ``"step"`` at which
            they stop. Both are called by the thread.
        path: The run, for errors.
        timeout_seconds: How long after a request ranks may take to report.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        inbox: SignalInbox,
        *,
        report: Callable[[int], Json],
        decide: Callable[[list[Json], float], Json],
        path: str,
        timeout_seconds: float,
    ) -> None:
        self.position = 0 if group is None else position_in(group)
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._group, self._inbox, self._report, self._decide = group, inbox, report, decide
        self._path, self._timeout_seconds = path, timeout_seconds
        self._store: Store = HashStore() if group is None else _get_default_store()
        self._prefix = "torchtitan_ext/boundaries"
        if group is not None:
            _numbers[group] = _numbers.get(group, 0) + 1
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store of torchrun's agent outlives its ranks
            self._prefix += f"/{life}/{group.group_name}/{_numbers[group]}"
        # All below is guarded by the condition, which no signal handler takes.
        self._changed = threading.Condition()
        self._passed = 0
        self._has_reported = self._is_closed = False
        self._verdict: Json = {}
        self._store_error: Exception | None = None
        self._thread = BackgroundThread("torchtitan_ext.boundaries", self._run, end=self._ask_to_end)

    def pass_(self, step: int) -> Json:
        """Passes the boundary of a step. Waits only between this rank's report and the verdict.

        Returns:
            The verdict; empty while there is none.

        Raises:
            LostRankError: Ranks have not reported in time, or the store is lost. The same on every rank.
        """
        with self._changed:
            if self._has_reported and not self._verdict:
                longest = self._timeout_seconds + RollCall.TAKE_OVER_SECONDS + _PATIENCE_SECONDS
                clock.wait_for(self._changed, lambda: self._verdict or self._store_error, longest)
                if not self._verdict:
                    raise self._lost(*where_the_store_was(self._store), False) from self._store_error
            if "silent" in self._verdict:
                raise self._lost(self._verdict["why"], self._verdict["silent"], True)
            self._passed = step
            return self._verdict if "step" in self._verdict else {}

    def close(self) -> None:
        """From now on this rank passes no boundary. Others that are asked later go on without a verdict."""
        self._ask_to_end()
        clock.join(self._thread, _PATIENCE_SECONDS)

    def _ask_to_end(self) -> None:
        self._is_closed = True
        self._inbox.wake()

    def _lost(self, why: str, silent: Sequence[int], was_asked: bool) -> LostRankError:
        doing = "ranks agreed on the step to stop at"
        return LostRankError(
            "save", doing, None, tuple(silent), f"{why}; {ADVICE}", path=self._path, was_asked=was_asked
        )

    def _run(self) -> None:
        """The thread."""
        try:
            own = self._store if self._group is None else take_clone(self._group, self._store)
            store = PrefixStore(self._prefix, own)
            while not self._is_closed:
                what = self._inbox.wait(poll_seconds(self.position))
                if not self._verdict and (what or store.check([_REQUEST])):
                    self._agree(store, what)
            store.compare_set(_VERDICT, "", json.dumps({"closed": self._ranks[self.position]}))
            if self._group is not None:
                give_back_clone(self._group, own)
        except (RuntimeError, ValueError) as error:  # the store is lost, and the job with it
            with self._changed:
                self._store_error = error
                self._changed.notify_all()

    def _agree(self, store: Store, what: str) -> None:
        # A rank that was not asked itself has heard of it one question later at most.
        begun = clock.now() - (0 if what else poll_seconds(self.position))
        if what:
            store.compare_set(_REQUEST, "", f"{what} at rank {self._ranks[self.position]}")
        with self._changed:
            self._has_reported = True
            passed = self._passed
        store.set(f"report/{self.position}", json.dumps(self._report(passed)))
        reports = [f"report/{position}" for position in range(len(self._ranks))]
        is_coordinator = self.position == 0
        deadline = clock.now() + self._timeout_seconds + (0 if is_coordinator else RollCall.TAKE_OVER_SECONDS)
        while not store.check([_VERDICT]):
            if clock.now() > deadline or (is_coordinator and store.check(reports)):
                store.compare_set(_VERDICT, "", json.dumps(self._count(store, reports, begun)))
            else:
                clock.sleep(RollCall.ANSWER_POLL_SECONDS)
        verdict = json.loads(store.get(_VERDICT))
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def _count(self, store: Store, reports: list[str], begun: float) -> Json:
        """The verdict: what ranks decide, or who has not reported."""
        why = store.get(_REQUEST).decode()
        silent = [rank for rank, key in zip(self._ranks, reports, strict=True) if not store.check([key])]
        if silent:
            waited = f"rank {self._ranks[self.position]} waited {self._timeout_seconds:g} s for them after {why}"
            return {"silent": silent, "why": waited}
        told = [json.loads(store.get(key)) for key in reports]
        return {"why": why, **self._decide(told, clock.now() - begun)}
