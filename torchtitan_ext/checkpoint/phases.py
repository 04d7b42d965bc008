"""The phases of one save or load: all ranks take part in each, and an error of any rank reaches all of them.

The collectives are DCP's own (``_DistWrapper``). Its exception, which is no ``Exception``, becomes one of ours here,
and a rank that is lost meanwhile is named.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from torchtitan_ext.errors import CheckpointFailedError, TorchtitanExtError
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks

T = TypeVar("T")
R = TypeVar("R")


class Phases:
    """Runs the phases of one operation over a process group, and keeps how long each took on this rank.

    Every method is collective. It raises on all ranks what a rank raised: our own error where it is one and nothing is
    undefined by then, else a ``CheckpointFailedError`` with the errors of all ranks that failed.

    Args:
        operation: ``"save"`` or ``"load"``, for messages.
        process_group: The ranks that take part; all by default.
        no_dist: Only this process does.
    """

    def __init__(
        self, operation: str, process_group: dist.ProcessGroup | None = None, *, no_dist: bool = False
    ) -> None:
        self._operation = operation
        self._group = process_group
        self._is_alone = no_dist or not (dist.is_available() and dist.is_initialized())
        self._collectives = _DistWrapper(process_group, not self._is_alone, 0)
        self.seconds: dict[str, float] = {}

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._collectives.rank

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return 1 if self._is_alone else self._collectives.get_world_size()

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank works for all in the steps that one rank takes."""
        return bool(self._collectives.is_coordinator)

    def on_all(self, name: str, work: Callable[[], T], *, doing: str, undefined: tuple[str, ...] = ()) -> list[T]:
        """The results of all ranks, on all ranks.

        Args:
            name: Of the phase, for ``seconds``.
            work: What each rank does.
            doing: What the ranks do meanwhile, to follow "while".
            undefined: Components that may be part-written if a rank fails.
        """
        with self._phase(name, doing, undefined):
            return self._collectives.all_gather(name, _with_picklable_errors(work))

    def through_coordinator(
        self, name: str, work: Callable[[], T], on_coordinator: Callable[[list[T]], list[R]], *, doing: str
    ) -> R:
        """What the coordinator makes for this rank of the results of all. Arguments as in ``on_all``."""
        with self._phase(name, doing):
            return self._collectives.reduce_scatter(name, _with_picklable_errors(work), on_coordinator)

    def to_coordinator(
        self, name: str, work: Callable[[], T], on_coordinator: Callable[[list[T]], R], *, doing: str
    ) -> R:
        """What the coordinator makes of the results of all, the same on every rank. Arguments as in ``on_all``."""
        with self._phase(name, doing):
            return self._collectives.all_reduce(name, _with_picklable_errors(work), on_coordinator)

    @contextmanager
    def _phase(self, name: str, doing: str, undefined: tuple[str, ...] = ()) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with nullcontext() if self._is_alone else naming_lost_ranks(self._operation, doing, self._group):
                yield
        except CheckpointException as error:
            raise _own_error(self._operation, error, undefined) from None
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def _own_error(operation: str, error: CheckpointException, undefined: tuple[str, ...]) -> TorchtitanExtError:
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    ours = next((failure for failure in failures.values() if isinstance(failure, TorchtitanExtError)), None)
    if ours is not None and not undefined:
        return ours
    texts = {rank: f"{type(failure).__name__}: {failure}" for rank, failure in failures.items()}
    return CheckpointFailedError(operation, texts, undefined)


def _with_picklable_errors(work: Callable[[], T]) -> Callable[[], T]:
    """Errors travel pickled: one that cannot be read back (a constructor with keywords only) would end the coordinator
    while it reads."""

    def guarded() -> T:
        try:
            return work()
        except BaseException as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from None
            raise

    return guarded
