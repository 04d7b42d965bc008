"""Where the ranks of a group stand, and through which store they find each other.

``torch.distributed`` knows the groups of one job. A group over two jobs (``transfer.meet``) is unknown to it: its ranks
are positions in it, named by job, and it has a store of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store, _world

from torchtitan_ext.errors import WrongValueError


@dataclass(frozen=True)
class Meeting:
    """Of a group over several jobs: the store, where it is, and the job and rank in it of each position.

    ``roll_call_seconds``: How long ranks have to answer when one is lost.
    """

    store: Store
    address: str
    members: tuple[tuple[str, int], ...]
    roll_call_seconds: float


_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()


def remember_meeting(group: dist.ProcessGroup, meeting: Meeting) -> None:
    """From now on the functions below know the group. Not collective."""
    _meetings[group] = meeting


def position_in(group: dist.ProcessGroup | None) -> int:
    """This process's position in a group; in the default group if left out."""
    return dist.get_rank() if group is None else group.rank()


def is_meeting(group: object) -> TypeGuard[dist.ProcessGroup]:
    """Whether it is a group over jobs, of which functions of ``torch.distributed`` know nothing."""
    return isinstance(group, dist.ProcessGroup) and group in _meetings


def own_rank(group: object) -> int:
    """The rank by which messages name this process: the global one, or the position in a group over jobs."""
    return group.rank() if is_meeting(group) else dist.get_rank()


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group as ``own_rank`` counts them, in the order of their positions.

    Raises:
        Exception: The group was destroyed.
    """
    return list(range(group.size())) if group in _meetings else dist.get_process_group_ranks(group)


def store_of(group: object) -> Store:
    """The store through which the ranks of a group find each other; that of the default group for what is none."""
    return _meetings[group].store if is_meeting(group) else _get_default_store()


def meeting_address(group: dist.ProcessGroup) -> str | None:
    """Of a group over jobs: where its store is, for messages; ``None`` of others."""
    meeting = _meetings.get(group)
    return None if meeting is None else meeting.address


def roll_call_seconds(group: object, default: float) -> float:
    """How long the ranks of a group have to answer when one is lost: as a meeting was told, else the default."""
    return _meetings[group].roll_call_seconds if is_meeting(group) else default


def members_text(group: object, ranks: Sequence[int]) -> str:
    """Of a group over jobs: which ranks of which job these positions are; empty of others."""
    members = _meetings[group].members if is_meeting(group) else ()
    return ", ".join(f"rank {rank} is {members[rank][0]} rank {members[rank][1]}" for rank in ranks if members)


def check_job_is_joined(where: str, otherwise: str) -> None:
    """Raises WrongValueError in a job of several ranks (``WORLD_SIZE``, as torchrun sets it) without a process group.

    Args:
        otherwise: What else to do, for the message.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    is_joined = dist.is_available() and dist.is_initialized()
    if not is_joined and num_ranks.isdecimal() and int(num_ranks) > 1:
        raise WrongValueError(
            f"{where}: this is one of {num_ranks} ranks by WORLD_SIZE, and there is no process group: each rank would "
            f"take itself for the only one; call torch.distributed.init_process_group first, {otherwise}"
        )


def groups_of_some_ranks() -> list[str]:
    """Names of the process groups of this rank that lack ranks of the job and have others; those of meshes have the
    names of axes behind ``mesh_``."""
    num_ranks = dist.get_world_size()
    groups = _world.pg_group_ranks.items()  # a number stands for the groups of others
    found = [one for one, ranks in groups if isinstance(one, dist.ProcessGroup) and 1 < len(ranks) < num_ranks]
    return list(dict.fromkeys(group.group_desc or group.group_name for group in found))
