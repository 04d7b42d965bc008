"""Saves before a job is stopped: at a step that all ranks agree on, where it fits into the time that is left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torchtitan_ext import clock
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.ranks.boundaries import Boundaries
from torchtitan_ext.ranks.signal_inbox import SignalInbox
from torchtitan_ext.ranks.stores import can_be_asked

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankTimes:
    """What a rank has measured in this run, in seconds.

    Attributes:
        passed: The last step whose boundary it has passed.
        step_seconds: Between the last two.
        staging_seconds: The longest part of a save that training waited for.
        saving_seconds: The longest from there until a save was committed.
        pending_seconds: How long the pending save has been going on; below 0 where none is.
    """

    passed: int = 0
    step_seconds: float = 0.0
    staging_seconds: float = 0.0
    saving_seconds: float = 0.0
    pending_seconds: float = -1.0


@dataclass(frozen=True)
class StopDecision:
    """The ranks stop at the first boundary from ``step`` on. ``text``: what they do there, and why."""

    step: int
    saves: bool
    text: str


def what_fits(times: Sequence[RankTimes], left_seconds: float | None) -> StopDecision:
    """What ranks do at the first boundary that none has passed, when so many seconds are left; ``None``: nobody knows.

    They wait for the pending save, and make a new one. Where both do not fit, they finish the pending one alone. Where
    none is pending they make the new one in any case: if it is killed it leaves no step.
    """
    step = max(one.passed for one in times) + 1
    pending = max(one.pending_seconds for one in times)
    steps = max(one.step_seconds * (step - one.passed) for one in times)
    saving = max(one.saving_seconds for one in times)
    new = saving + max(one.staging_seconds for one in times)
    rest = max(0.0, saving - pending - steps) if pending >= 0 else 0.0
    first = "save this step and stop" if pending < 0 else "wait for the pending save, save this step, and stop"
    if left_seconds is None:
        return StopDecision(step, True, f"{first}; nobody has said how much time is left (grace_seconds)")
    left = f"{max(0.0, left_seconds):.1f} s are left"
    if saving == 0:
        return StopDecision(step, True, f"{first}; {left}, and no save of this run has been measured yet")
    parts = f"{steps:.1f} s to come here" + (f", {rest:.1f} s for the pending save" if pending >= 0 else "")
    parts += f" and {new:.1f} s for a new one"
    if steps + rest + new <= left_seconds:
        return StopDecision(step, True, f"{first}: {parts}; {left}")
    if pending < 0:
        return StopDecision(step, True, f"{first}, which may take too long: {parts}; {left}")
    return StopDecision(step, False, f"finish the pending save alone and stop: {parts} do not fit; {left}")


class Preemption:
    """Hears signals and requests, and stops all ranks of a run at one step. All ranks make one.

    Attributes:
        should_stop: Whether this rank has come to the step at which all ranks stop.
        request: Does what a signal does, by a text that says what it is.
    """

    def __init__(
        self,
        run: str,
        group: dist.ProcessGroup | None,
        signals: Sequence[str],
        grace_seconds: float | None,
        timeout: float,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and not can_be_asked(_get_default_store()):
            raise WrongValueError(
                f"CheckpointManager: got signals or grace_seconds, and ranks cannot agree through the store of this "
                f"group, a {type(_get_default_store()).__name__}; make it with a TCPStore, or leave them out"
            )
        self._inbox = inbox = SignalInbox("CheckpointManager", signals)
        self.request = inbox.request
        self.should_stop = False
        self._run, self._grace_seconds = run, grace_seconds
        self._step_seconds = self._staging_seconds = self._saving_seconds = 0.0
        self._passed_at: float | None = None
        self._pending_since: float | None = None
        self._stop_at = 0
        timeout = timeout if grace_seconds is None else min(timeout, grace_seconds)
        self._boundaries = Boundaries(
            group, inbox, report=self._report, decide=self._decide, path=run, timeout_seconds=timeout
        )
        if inbox.chained and self._boundaries.position == 0:
            logger.warning("%s: %s had a handler before, which is called too", run, ", ".join(inbox.chained))

    def resumed(self, step: int) -> None:
        """This rank stands at the boundary of another step."""
        self._boundaries.pass_(step)
        self._passed_at = None

    def passes(self, step: int, is_due: bool) -> bool:
        """Passes the boundary of a step, and says whether it is saved. ``is_due``: whether it is one of ``every``."""
        verdict, now = self._boundaries.pass_(step), clock.now()
        self._step_seconds = 0.0 if self._passed_at is None else now - self._passed_at
        self._passed_at = now
        if not verdict or step < verdict["step"]:
            return is_due
        if not self.should_stop:
            self.should_stop, self._stop_at = True, step
            if self._boundaries.position == 0:
                logger.warning("%s: %s: at step %d all ranks %s", self._run, verdict["why"], step, verdict["text"])
        return bool(verdict["saves"]) if step == self._stop_at else is_due

    def saved(self, begun: float, pending: Future[Any] | None) -> None:
        """A save that began then, in ``clock.now``, has ended, or is pending."""
        now = clock.now()
        if pending is None:
            self._saving_seconds = max(self._saving_seconds, now - begun)
            return
        self._staging_seconds = max(self._staging_seconds, now - begun)
        self._pending_since = now
        pending.add_done_callback(lambda _: self._has_saved(now))

    def close(self) -> None:
        """Gives the signals back."""
        self._boundaries.close()
        self._inbox.close()

    def _has_saved(self, since: float) -> None:
        self._pending_since = None
        self._saving_seconds = max(self._saving_seconds, clock.now() - since)

    def _report(self, passed: int) -> dict[str, Any]:
        since = self._pending_since
        pending = -1.0 if since is None else clock.now() - since
        return asdict(RankTimes(passed, self._step_seconds, self._staging_seconds, self._saving_seconds, pending))

    def _decide(self, told: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        left = None if self._grace_seconds is None else self._grace_seconds - seconds
        return asdict(what_fits([RankTimes(**one) for one in told], left))
