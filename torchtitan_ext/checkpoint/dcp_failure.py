"""What goes wrong inside DCP, as our errors: its exception, which is no ``Exception``, and a rank that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_ext.errors import CheckpointFailedError, TorchtitanExtError
from torchtitan_ext.ranks.lost_ranks import naming_lost_ranks

EXCHANGE = "ranks exchanged plans and results; checkpoints in other directories are as they were"
"""What ranks do in most of a save or load."""


@contextmanager
def own_errors(
    operation: str,
    group: dist.ProcessGroup | None = None,
    *,
    no_dist: bool = False,
    phase: str | Callable[[], str] = EXCHANGE,
    undefined: Callable[[], tuple[str, ...]] = tuple,
) -> Iterator[None]:
    """Raises our errors instead of DCP's, and names the rank where one is lost.

    Args:
        operation: For example ``"save"``.
        group: The ranks that take part.
        no_dist: There are no others.
        phase: See ``naming_lost_ranks``.
        undefined: Called when ranks failed: the components that may be part-written by then.
    """
    try:
        with nullcontext() if no_dist else naming_lost_ranks(operation, phase, group):
            yield
    except CheckpointException as error:
        raise own_error(operation, error, undefined()) from None


def own_error(operation: str, error: CheckpointException, undefined: tuple[str, ...] = ()) -> TorchtitanExtError:
    """Our own error where a rank raised one and nothing is undefined, else one that names every rank that failed."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    ours = next((failure for failure in failures.values() if isinstance(failure, TorchtitanExtError)), None)
    if ours is not None and not undefined:
        return ours
    texts = {rank: f"{type(failure).__name__}: {failure}" for rank, failure in failures.items()}
    return CheckpointFailedError(operation, texts, undefined)
