"""Connections beside a process group: for what its ranks say to each other in a thread, while others use the group.

Two threads that call collectives of one group meet each other's: each rank may be first in another of them. So a save
that goes on beside training has a backend of its own, of the same ranks in the same order. It is made once and lives as
long as its group. It is no group that ``torch.distributed`` knows of: ``new_group(use_local_synchronization=True)``
names a group by how many others a rank is in, which need not be equally many on all its ranks.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchtitan_ext.ranks.watch import can_be_asked


@dataclass(frozen=True)
class SideGroup:
    """What stands beside a group: collectives in CPU memory, and a name that is the same on all ranks."""

    name: str
    backend: dist.ProcessGroupGloo


@dataclass(frozen=True)
class SideGroupOffer:
    """What a rank knows beside a group, if anything, and a name for something new."""

    known: str | None
    new: str


# A group that was destroyed takes its entry with it. Threads do not meet here: the entry of a group is set in one step,
# by the operation whose turn it is on that group.
_side_groups: WeakKeyDictionary[dist.ProcessGroup, SideGroup] = WeakKeyDictionary()


def can_have_side_group() -> bool:
    """Whether gloo is there, and a store by which its ranks find each other. Not collective."""
    return dist.is_gloo_available() and can_be_asked(_get_default_store())


def offer_of(group: dist.ProcessGroup) -> SideGroupOffer:
    """What this rank says of a group, for the others to hear. Not collective."""
    side = side_group_of(group)
    return SideGroupOffer(None if side is None else side.name, uuid.uuid4().hex)


def side_group_of(group: dist.ProcessGroup) -> SideGroup | None:
    """What was made beside a group. Not collective."""
    return _side_groups.get(group)


def make_side_group(group: dist.ProcessGroup, name: str, *, timeout_seconds: float) -> None:
    """Connects each rank of a group with each other. Collective.

    Args:
        name: The same on all ranks, and new: where a rank has failed others may have one of an earlier name.

    Raises:
        RuntimeError: A rank cannot be reached, or does not come in time; says what to do.
    """
    store = PrefixStore(f"torchtitan_ext/side_group/{name}", _get_default_store().clone())  # type: ignore[attr-defined]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds))
    except Exception as error:
        raise RuntimeError(
            f"the ranks cannot be connected by gloo for a save beside training ({error}); name the network interface "
            "in GLOO_SOCKET_IFNAME, raise the limit of open files (ulimit -n), or use tte.save"
        ) from error
    _side_groups[group] = SideGroup(name, backend)
