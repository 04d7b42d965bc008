"""Which rank is lost when a collective fails.

A backend says at best "connection closed by peer". When a collective of a sync fails, each rank that notices answers a
roll call in the store of the process groups, and the error names the ranks that did not answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from torchtitan_ext import clock
from torchtitan_ext.errors import LostRankError, TorchtitanExtError
from torchtitan_ext.ranks.exchange import Scope, all_gather_bytes, finish_collective, scope_ranks

# Neighbours see a lost connection within milliseconds, the other ranks only when these neighbours give up.
_ROLL_CALL_SECONDS = 5.0
_POLL_SECONDS = 0.05

# Functions of torch.distributed that wait for other ranks: what gloo raises in them is a plain RuntimeError.
_COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_reduce", "all_to_all"),
        *("all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    }
)


@contextmanager
def naming_lost_ranks(operation: str, phase: str | Callable[[], str], scope: Scope) -> Iterator[None]:
    """Turns an error of a collective in the ``with`` into a ``LostRankError``; other errors stay as they are.

    ``phase`` says what the ranks do, after "while"; a function is called when a rank is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not (dist.is_initialized() and _is_of_a_collective(error)):
            raise
        done = phase if isinstance(phase, str) else phase()
        silent = _silent_ranks(operation, scope)
        raise LostRankError(operation, done, dist.get_rank(), silent, f"the backend says: {error}") from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether a collective raised an error: by the error's type, or because the traceback ends in a collective."""
    if isinstance(error, (TorchtitanExtError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return False
    if isinstance(error, dist.DistError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code, module = traceback.tb_frame.f_code, traceback.tb_frame.f_globals.get("__name__")
    is_ours = code in (all_gather_bytes.__code__, finish_collective.__code__)
    return is_ours or (module == dist.distributed_c10d.__name__ and code.co_name in _COLLECTIVES)


def _silent_ranks(operation: str, scope: Scope) -> tuple[int, ...]:
    """The ranks that do not answer in time; all if the store is gone with its host.

    Each rank answers with the count of its failures. A count that was there at first and is below this rank's own
    count is the answer to an earlier failure: the rank survived that one, and may be lost now.
    """
    ranks, own = scope_ranks(scope), dist.get_rank()
    silent = [rank for rank in ranks if rank != own]
    digest = hashlib.blake2b(str(sorted(ranks)).encode(), digest_size=8).hexdigest()
    prefix = f"torchtitan_ext/roll_call/{operation}/{digest}"
    deadline = clock.now() + _ROLL_CALL_SECONDS
    try:
        store = _get_default_store()
        own_count = store.add(f"{prefix}/{own}", 1)
        at_first = {rank: _count_of(store, prefix, rank) for rank in silent}
        silent = [rank for rank in silent if at_first[rank] < own_count]
        while silent and clock.now() < deadline:
            clock.sleep(_POLL_SECONDS)
            silent = [rank for rank in silent if _count_of(store, prefix, rank) == at_first[rank]]
    except RuntimeError:
        pass
    return tuple(silent)


def _count_of(store: Store, prefix: str, rank: int) -> int:
    return store.add(f"{prefix}/{rank}", 0)
