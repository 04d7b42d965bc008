"""DCP's exception, which is no ``Exception``, as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_ext.errors import CheckpointFailedError, TorchtitanExtError


@contextmanager
def own_errors(operation: str, undefined: Callable[[], tuple[str, ...]] = tuple) -> Iterator[None]:
    """Raises our errors instead of DCP's.

    Args:
        operation: For example ``"save"``.
        undefined: Called when ranks failed: the components that may be part-written by then.
    """
    try:
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
