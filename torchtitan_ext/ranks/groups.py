"""Where the ranks of a group stand, and through which store they find each other.

``torch.distributed`` knows the groups of one job. A group over two jobs (``transfer.meet``) is unknown to it: its ranks
are positions in it, named by job, and it has a store of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store


@dataclass(frozen=True)
class Meeting:
    """Of a group over several jobs: the store, where it is, and the job and rank in it of each position."""

    store: Store
    address: str
    members: tuple[tuple[str, int], ...]


_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()


def remember_meeting(group: dist.ProcessGroup, meeting: Meeting) -> None:
    """From now on the functions below know the group. Not collective."""
    _meetings[group] = meeting


def position_in(group: dist.ProcessGroup | None) -> int:
    """This process's position in a group; in the default group if left out."""
    return dist.get_rank() if group is None else group.rank()


def own_rank(group: dist.ProcessGroup) -> int:
    """The rank by which messages name this process: the global one, or the position in a group over jobs."""
    return group.rank() if group in _meetings else dist.get_rank()


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group as ``own_rank`` counts them, in the order of their positions.

    Raises:
        Exception: The group was destroyed.
    """
    return list(range(group.size())) if group in _meetings else dist.get_process_group_ranks(group)


def store_of(group: dist.ProcessGroup) -> Store:
    """The store through which the ranks of a group find each other."""
    meeting = _meetings.get(group)
    return _get_default_store() if meeting is None else meeting.store


def meeting_address(group: dist.ProcessGroup) -> str | None:
    """Of a group over jobs: where its store is, for messages; ``None`` of others."""
    meeting = _meetings.get(group)
    return None if meeting is None else meeting.address


def members_text(group: dist.ProcessGroup, ranks: Sequence[int]) -> str:
    """Of a group over jobs: which ranks of which job these positions are; empty of others."""
    meeting = _meetings.get(group)
    if meeting is None or not ranks:
        return ""
    return ", ".join(f"rank {rank} is {meeting.members[rank][0]} rank {meeting.members[rank][1]}" for rank in ranks)
