"""Connections beside a process group, over which a save in a thread exchanges while other threads use the group.

Two threads that call collectives of one group would mix them up: one rank may call first what another calls second. So
a save beside training has a backend of its own, of the same ranks in the same order. It is made once and lives as long
as its group. ``torch.distributed`` does not know it as a group: ``new_group(use_local_synchronization=True)`` names a
group by the number of groups that a rank is in, and ranks may be in unequally many.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.ranks.stores import can_be_asked


@dataclass(frozen=True)
class SideGroup:
    """The connections beside a group: a backend for collectives in CPU memory, and a name, the same on all ranks."""

    name: str
    backend: dist.ProcessGroupGloo


@dataclass(frozen=True)
class GroupOffer:
    """The name of the side group that a rank has, if any, and a name for a new one."""

    known: str | None
    new: str


def known_to_all(offers: Sequence[GroupOffer]) -> str | None:
    """The name of the group that all ranks have; ``None`` where they need a new one."""
    names = {offer.known for offer in offers}
    return names.pop() if len(names) == 1 else None


# A group that was destroyed takes its entry with it. Threads do not meet here: the entry of a group is set in one step,
# by the operation whose turn it is on that group.
_side_groups: WeakKeyDictionary[dist.ProcessGroup, SideGroup] = WeakKeyDictionary()


def can_have_side_group() -> bool:
    """Whether there is gloo, and a store through which ranks find each other. Not collective."""
    return dist.is_gloo_available() and can_be_asked(_get_default_store())


def offer_of(group: dist.ProcessGroup) -> GroupOffer:
    """The offer of this rank for a group, to be sent to the others. Not collective."""
    side = side_group_of(group)
    return GroupOffer(None if side is None else side.name, uuid.uuid4().hex)


def side_group_of(group: dist.ProcessGroup) -> SideGroup | None:
    """The side group of a group, if one was made. Not collective."""
    return _side_groups.get(group)


def make_side_group(group: dist.ProcessGroup, name: str, *, timeout_seconds: float) -> None:
    """Connects the ranks of a group. Collective. Raises RuntimeError if a rank cannot be reached, or comes too late.

    All pass the same name, a new one: after a failure on one rank others may have a side group of an older name.
    """
    store = PrefixStore(f"torchtitan_ext/side_group/{name}", _get_default_store().clone())  # type: ignore[attr-defined]
    rank, size = position_in(group), group.size()
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds))
    except Exception as error:
        raise RuntimeError(
            f"the ranks cannot be connected by gloo for a save beside training ({error}); name the network interface "
            "in GLOO_SOCKET_IFNAME, raise the limit of open files (ulimit -n), or use tte.save"
        ) from error
    _side_groups[group] = SideGroup(name, backend)
