"""The store of the process groups, through which ranks ask each other."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

# The stores with ``clone`` and ``check``.
_ASKED_STORES = (dist.TCPStore, dist.FileStore, dist.HashStore)  # type: ignore[attr-defined]


def can_be_asked(store: Store | None) -> bool:
    """Whether ranks can ask each other: MPI has no store, and a store written in Python may lack what it takes."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    return isinstance(inner, _ASKED_STORES)


# The clones of stores that no operation uses now, by group: a thread needs a store of its own, since another one may
# wait in the shared one, and blocks it meanwhile. They are kept: each new clone of a TCPStore is a connection, and each
# new one of a FileStore reads the whole file, to which it also writes. Changed only under the lock.
_idle_clones: WeakKeyDictionary[dist.ProcessGroup, list[Store]] = WeakKeyDictionary()
_taking = threading.Lock()


def take_clone(group: dist.ProcessGroup, store: Store) -> Store:
    """A store for one thread, until it gives it back."""
    with _taking:
        idle = _idle_clones.setdefault(group, [])
        kept = idle.pop() if idle else None
    return store.clone() if kept is None else kept  # type: ignore[attr-defined]


def give_back_clone(group: dist.ProcessGroup, store: Store) -> None:
    """Takes only a clone that has failed in nothing."""
    with _taking:
        _idle_clones.setdefault(group, []).append(store)


def where_the_store_was(store: Store) -> tuple[str, tuple[int, ...]]:
    """Of a store that is lost, for errors: who hosted it, and the ranks that are lost with it."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(inner, dist.FileStore):  # type: ignore[attr-defined]
        return f"the store of the process groups, the file {getattr(inner, 'path', '')}, is lost", ()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the store of the process groups, which the launcher's agent on the first node hosts, is lost", ()
    return "the store of the process groups, which rank 0 hosts, is lost", (0,)
