"""Where this rank stands in process groups, and which groups there are."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from torchtitan_ext.errors import WrongValueError


def position_in(group: dist.ProcessGroup | None) -> int:
    """This process's position in a group; in the default group if left out."""
    return dist.get_rank() if group is None else group.rank()


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
