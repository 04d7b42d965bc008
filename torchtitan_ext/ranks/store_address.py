"""Where the ranks of this job find each other, so that a child process can join them there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store


@dataclass(frozen=True)
class StoreAddress:
    """The address of a ``TCPStore``, or the path of a ``FileStore`` where ``port`` is 0."""

    host: str
    port: int

    def connect(self, name: str, timeout: timedelta) -> Store:
        """The store, under keys of its own."""
        store: Store
        if self.port == 0:
            store = FileStore(self.host, -1)
        else:
            store = TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        return PrefixStore(f"torchtitan_ext/{name}", store)


def address_of_default_store() -> StoreAddress | None:
    """The address of the default group's store; ``None`` where no other process can reach it. Not collective."""
    store = getattr(_get_default_store(), "_underlying_non_prefix_store", None)
    if isinstance(store, TCPStore):
        return StoreAddress(store.host, store.port)
    return StoreAddress(store.path, 0) if isinstance(store, FileStore) else None  # type: ignore[attr-defined]
