"""The time and bytes of each save, load and sync: a line in the log, and a dict on its record.

The coordinator logs the line at level INFO below the logger ``torchtitan_ext``, when the operation has ended well:

    save of /run/step-100: 2,048,000,000 bytes by 8 ranks in 1.31 s, 1.56 GB/s (prepare 0.002, plan 0.011, write 1.297)

Any handler of ``logging`` receives it, also where a trainer that knows nothing of metrics calls the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchtitan_ext import clock
from torchtitan_ext.errors import only_printed

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
    begin = clock.now()
    try:
        yield
    finally:
        phase_seconds[phase] = phase_seconds.get(phase, 0.0) + clock.now() - begin


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
