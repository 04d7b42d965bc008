"""The time and bytes of each save, load and sync: a line in the log, a dict on its record, and a trace on request.

The coordinator logs the line at level INFO below the logger ``torchtitan_ext``, when the operation has ended well:

    save of /run/step-100: 2,048,000,000 bytes by 8 ranks in 1.31 s, 1.56 GB/s (prepare 0.002, plan 0.011, write 1.297)

Any handler of ``logging`` receives it, also where a trainer that knows nothing of metrics calls the save.

A trace is one file that shows when each rank did what (ui.perfetto.dev and chrome://tracing open it). Ranks send their
spans beside the messages of each phase. So a trace needs no collective of its own, ranks with a trace work together
with ranks without one, and a save that fails leaves a trace of all that reached the coordinator.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from torchtitan_ext.errors import check_argument, only_printed, warn

__all__ = ["MetricsHandler"]


class MetricsHandler(logging.Handler):
    """Hands the metrics of each save, load and sync to a function: see docs/reference/observability.md for the keys.

    To be added to ``logging.getLogger("torchtitan_ext")``, whose level has to be INFO. An error of the function is
    printed as ``logging`` does it and harms no save.

    Args:
        callback: Called on the coordinator; for ``async_save`` in the thread that saves.
    """

    def __init__(self, callback: Callable[[dict[str, Any]], object]) -> None:
        super().__init__(logging.INFO)
        self._callback = callback

    def emit(self, record: logging.LogRecord) -> None:
        metrics = getattr(record, "metrics", None)
        if metrics is None:
            return
        try:
            self._callback(metrics)
        except Exception:
            self.handleError(record)


@contextmanager
def timed(phase_seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds that the ``with`` takes to ``phase_seconds[phase]``."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        phase_seconds[phase] = phase_seconds.get(phase, 0.0) + time.perf_counter() - begin


def log_metrics(
    logger: logging.Logger,
    operation: str,
    *,
    path: str = "",
    ranks: int,
    num_bytes: int,
    phase_seconds: Mapping[str, float],
    retries: int = 0,
    failures: int = 0,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Logs an operation that has ended. The coordinator calls it. Errors of handlers are printed.

    ``ranks`` ranks together have moved ``num_bytes``; the seconds are those of this rank, the retries those of all.
    ``more`` has metrics that only some operations have.
    """
    seconds = sum(phase_seconds.values())
    rate = num_bytes / seconds / 1e9
    metrics = {
        "operation": operation,
        "path": path,
        "ranks": ranks,
        "bytes": num_bytes,
        "seconds": seconds,
        "phase_seconds": dict(phase_seconds),
        "gb_per_second": rate,
        "retries": retries,
        "failures": failures,
        **(more or {}),
    }
    place = f"{operation} of {path}" if path else operation
    phases = ", ".join(f"{name} {one:.3f}" for name, one in phase_seconds.items())
    by = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    text = f"{place}: {num_bytes:,} bytes by {by} in {seconds:.2f} s, {rate:.3g} GB/s ({phases})"
    with only_printed():
        logger.info(text, extra={"metrics": metrics})


@dataclass(frozen=True)
class Span:
    """One thing that a rank did, and when, in ``time.time`` of its machine. ``end_seconds`` is ``None`` meanwhile."""

    rank: int
    name: str
    begin_seconds: float
    end_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Traced:
    """The pickled bytes that a rank sends in a phase, and its spans that are new since it last sent some."""

    data: bytes
    spans: Sequence[Span]


class Trace:
    """The spans of this rank; on the coordinator, which writes the file, those of all ranks that have sent some."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # The working directory may be another one when an asynchronous save has ended.
        self.path = Path(path).absolute()
        self.rank = 0
        """This rank, counted in the group."""
        # A span is entered when it begins, and again when it has ended.
        self._spans: dict[tuple[int, str, float], Span] = {}
        self._unsent: dict[tuple[int, str, float], Span] = {}
        # Spans do not run backwards when somebody sets the machine's clock.
        self._clock_offset = time.time() - time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the ``with`` as a span."""
        span = Span(self.rank, name, self._now())
        self._record(span)
        error = ""
        try:
            yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self._record(replace(span, end_seconds=self._now(), error=error))

    def unsent(self) -> list[Span]:
        """The spans that began or ended since the last call."""
        spans = list(self._unsent.values())
        self._unsent.clear()
        return spans

    def add(self, spans: Sequence[Span]) -> None:
        """Takes the spans of another rank, on the coordinator."""
        if self.rank == 0:
            self._spans.update((_key(span), span) for span in spans if span.rank != 0)

    def write(self, operation: str, checkpoint: str) -> None:
        """Writes the file. A span whose end the coordinator has not received ends now.

        A file that cannot be written is a warning: the save or load does not depend on it.
        """
        now = self._now()
        begin = min((span.begin_seconds for span in self._spans.values()), default=now)
        ranks = sorted({span.rank for span in self._spans.values()})
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
            for rank in ranks
        ]
        for span in sorted(self._spans.values(), key=lambda span: (span.rank, span.begin_seconds)):
            end = max(span.begin_seconds, now) if span.end_seconds is None else span.end_seconds
            event: dict[str, Any] = {"ph": "X", "name": span.name, "cat": operation, "pid": span.rank, "tid": 0}
            event |= {"ts": 1e6 * (span.begin_seconds - begin), "dur": 1e6 * (end - span.begin_seconds)}
            events.append(event | ({"args": {"error": span.error}} if span.error else {}))
        content = {"traceEvents": events, "otherData": {"operation": operation, "path": checkpoint}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(content))
        except (OSError, ValueError) as error:  # a path may be no name of a file
            warn(f"the trace of a {operation} is not written: {error}")

    def _record(self, span: Span) -> None:
        self._spans[_key(span)] = span
        self._unsent[_key(span)] = span

    def _now(self) -> float:
        return self._clock_offset + time.perf_counter()


def begin_trace(operation: str, path: str | os.PathLike[str] | None) -> Trace | None:
    """A trace, or ``None`` without a path. Raises TypeError if ``path`` is something else."""
    check_argument(operation, "trace", path, (str, os.PathLike, NoneType), "a file")
    return None if path is None else Trace(path)


def _key(span: Span) -> tuple[int, str, float]:
    return span.rank, span.name, span.begin_seconds
