"""The ranks that take part in a sync: what they tell each other, and which of them is lost.

A backend says at best "connection closed by peer". Where a phase of a sync fails, each rank that noticed answers a roll
call in the store of the process groups, and the error names those that did not.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.errors import LostRankError, TorchtitanExtError
from torchtitan_ext.ranks.exchange import all_gather_values, gather_values

T = TypeVar("T")
Scope = DeviceMesh | dist.ProcessGroup | None
"""The ranks that take part: those of a mesh, of a group, or all."""

# A lost connection is seen within milliseconds by its neighbours; by the others only once these give up.
_ROLL_CALL_SECONDS = 5.0
_POLL_SECONDS = 0.05


def gather(scope: Scope, value: T) -> list[T]:
    """The picklable values of all ranks of a scope. Collective."""
    if isinstance(scope, DeviceMesh):
        return all_gather_values(scope, value)
    # In a list, as all_gather_values sends it: ranks of which only some name the mesh understand each other.
    return [member for part in gather_values([value], scope) for member in part]


def scope_ranks(scope: Scope) -> list[int]:
    """Global ranks of a scope, in the order of ``gather``."""
    if isinstance(scope, DeviceMesh):
        return [int(rank) for rank in scope.mesh.flatten().tolist()]
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(dist.group.WORLD if scope is None else scope)


@contextmanager
def naming_lost_ranks(operation: str, phase: str | Callable[[], str], scope: Scope) -> Iterator[None]:
    """Turns what a collective raises inside into a ``LostRankError``; a lack of memory and a device's fault stay as
    they are.

    Args:
        phase: What the ranks did, to follow "while"; a function is called when one is lost.
        scope: Those who are asked whether they are still there.
    """
    _withdraw_answer()
    try:
        yield
    except (TorchtitanExtError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        done = phase if isinstance(phase, str) else phase()
        raise LostRankError(operation, done, dist.get_rank(), _silent_ranks(scope_ranks(scope)), str(error)) from error


def _silent_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks that do not answer in time; all of them where the store is gone too, with the rank that serves it."""
    own_rank = dist.get_rank()
    silent = [rank for rank in ranks if rank != own_rank]
    deadline = time.monotonic() + _ROLL_CALL_SECONDS
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_answer_of(own_rank), "here")
        _answered.append((weakref.ref(store), _answer_of(own_rank)))
        while silent and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            silent = [rank for rank in silent if not store.check([_answer_of(rank)])]
    except RuntimeError:
        pass
    return tuple(silent)


# Weak, or the port of a world that was destroyed would stay taken, and the next one on it would meet there.
_answered: list[tuple[weakref.ref[dist.distributed_c10d.Store], str]] = []


def _withdraw_answer() -> None:
    """A rank that survived one failure, and syncs again, may be the one that is lost in the next."""
    while _answered:
        reference, key = _answered.pop()
        store = reference()
        if store is not None and dist.is_initialized() and store is dist.distributed_c10d._get_default_store():
            with suppress(RuntimeError):
                store.delete_key(key)


def _answer_of(rank: int) -> str:
    return f"torchtitan_ext/roll_call/{rank}"
