"""Saves before a job is stopped: at a step that all ranks agree on, where it fits into the time that is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from signal import Signals
from typing import Any

import torch.distributed as dist

from torchtitan_ext.ranks.boundaries import Boundaries
from torchtitan_ext.runs.signals import SignalInbox

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankTimes:
    """What one rank has measured in this run when it hears of a request. Times are in seconds.

    Attributes:
        passed: The last step whose boundary it has passed.
        step_seconds: Between its last two boundaries.
        staging_seconds: The longest part of a save that training waited for.
        saving_seconds: The longest from there until a save was committed.
        pending_seconds: How long the pending save has been going on, if there is one.
    """

    passed: int
    step_seconds: float = 0.0
    staging_seconds: float = 0.0
    saving_seconds: float = 0.0
    pending_seconds: float | None = None


@dataclass(frozen=True)
class Fit:
    """Whether the ranks save before they stop, and a line that says why."""

    saves: bool
    text: str


def what_fits(step: int, times: Sequence[RankTimes], left_seconds: float | None) -> Fit:
    """What the ranks do at a step when so many seconds are left; ``None`` if nobody knows how many.

    They wait for the pending save, and make a new one. Where both do not fit, the pending one alone is finished. Where
    none is pending the new one is made in any case: it may be faster than those before, and if it is killed it leaves
    no step.
    """
    pending = [one.pending_seconds for one in times if one.pending_seconds is not None]
    steps = max(one.step_seconds * (step - one.passed) for one in times)
    staging = max(one.staging_seconds for one in times)
    saving = max(one.saving_seconds for one in times)
    rest = max(0.0, saving - max(pending) - steps) if pending else 0.0
    new = staging + saving
    needed = steps + rest + new
    first = f"save step {step} and stop" + (", when the pending save is done" if pending else "")
    if left_seconds is None:
        return Fit(True, f"{first}; nobody has said how much time is left (grace_seconds)")
    left = f"{max(0.0, left_seconds):.1f} s are left"
    if saving == 0:
        return Fit(True, f"{first}; {left}, and no save of this run has been measured yet")
    parts = f"{steps:.1f} s for steps" + (f", {rest:.1f} s for the pending save" if pending else "")
    if needed <= left_seconds or not pending:
        hope = "" if needed <= left_seconds else ", which may be too little"
        return Fit(True, f"{first}: {parts} and {new:.1f} s for the new one; {left}{hope}")
    text = f"stop at step {step} without saving it, and finish the pending save: {parts} and {new:.1f} s for a new one"
    return Fit(False, f"{text} do not fit; {left}")


class Preemption:
    """Hears signals and requests, and stops all ranks of a run at one step. All ranks make one.

    Attributes:
        should_stop: Whether this rank has come to the step at which all ranks stop.
    """

    def __init__(
        self,
        run: str,
        group: dist.ProcessGroup | None,
        signals: Sequence[Signals],
        grace_seconds: float | None,
        timeout_seconds: float,
    ) -> None:
        self._run, self._grace_seconds = run, grace_seconds
        self._step_seconds = self._staging_seconds = self._saving_seconds = 0.0
        self._passed_at = 0.0
        self._pending_since: float | None = None
        self._stop_at = 0
        self.should_stop = False
        self.inbox = SignalInbox(signals)
        try:
            self._boundaries = Boundaries(
                group if group is not None or not dist.is_initialized() else dist.group.WORLD,
                self.inbox,
                describe=self._times,
                decide=self._decide,
                path=run,
                timeout_seconds=timeout_seconds if grace_seconds is None else min(timeout_seconds, grace_seconds),
            )
        except BaseException:
            self.inbox.close()
            raise
        if self.inbox.chained and self._boundaries.position == 0:
            logger.warning(
                "%s: %s already had a handler, which is called too", run, " and ".join(self.inbox.chained)
            )

    def passes(self, step: int, is_due: bool) -> bool:
        """Passes the boundary of a step, and says whether it is saved. ``is_due``: whether it is one of ``every``."""
        verdict = self._boundaries.pass_(step)
        now = time.monotonic()
        self._step_seconds, self._passed_at = now - self._passed_at if self._passed_at else 0.0, now
        if verdict is None or step < verdict["step"]:
            return is_due
        if not self.should_stop:
            self.should_stop, self._stop_at = True, step
            if self._boundaries.position == 0:
                logger.warning("%s: %s: all ranks %s", self._run, verdict["why"], verdict["text"])
        return bool(verdict["saves"]) if step == self._stop_at else is_due

    def resumed(self, step: int) -> None:
        """This rank goes on from a step."""
        self._boundaries.restart(step)
        self._passed_at = 0.0

    def saved(self, begun: float, pending: Future[Any] | None) -> None:
        """A save that began then, in ``time.monotonic``, has ended on this thread, or is pending."""
        now = time.monotonic()
        if pending is None:
            self._saving_seconds = max(self._saving_seconds, now - begun)
            return
        self._staging_seconds = max(self._staging_seconds, now - begun)
        self._pending_since = now
        pending.add_done_callback(lambda _: self._has_saved(now))

    def close(self) -> None:
        """Gives the signals back."""
        self._boundaries.close()
        self.inbox.close()

    def _has_saved(self, since: float) -> None:
        self._pending_since = None
        self._saving_seconds = max(self._saving_seconds, time.monotonic() - since)

    def _times(self, passed: int) -> dict[str, Any]:
        since = self._pending_since
        pending = None if since is None else time.monotonic() - since
        times = RankTimes(passed, self._step_seconds, self._staging_seconds, self._saving_seconds, pending)
        return asdict(times)

    def _decide(self, step: int, reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        left = None if self._grace_seconds is None else self._grace_seconds - seconds
        return asdict(what_fits(step, [RankTimes(**report) for report in reports], left))
