"""Which data-parallel rank this process is, and of how many: as the caller says, or as the job tells.

Two ranks that both take themselves for the only one train on the same samples, and nothing looks wrong. So where
neither the caller nor the job says it, it is asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.errors import WrongValueError, check_argument, check_counts
from torchtitan_ext.layout.layout import row_major_position
from torchtitan_ext.layout.mesh_axes import is_data_parallel, is_model_parallel
from torchtitan_ext.ranks.groups import check_job_is_joined, groups_of_some_ranks

_HOW = "pass mesh=mesh['dp'], or dp_rank= and dp_size="


class DataRank(NamedTuple):
    """A data-parallel rank, how many there are, and their process group: ``None`` for the default one."""

    rank: int
    size: int
    group: dist.ProcessGroup | None


def data_rank(
    where: str,
    dp_rank: int | None,
    dp_size: int | None,
    mesh: DeviceMesh | None,
    group: dist.ProcessGroup | None = None,
) -> DataRank:
    """This process's data-parallel rank; not collective.

    By ``mesh``; by ``dp_rank`` and ``dp_size``; by ``group``; otherwise all ranks of the job are data-parallel ones.

    Raises:
        TypeError: An argument is of another type.
        WrongValueError: Both are given, or one of the two numbers; the mesh has axes of other parallelism; or nothing
            is given, and the job has groups of some of its ranks, as meshes with several axes make them.
    """
    check_counts(where, dp_rank=dp_rank, dp_size=dp_size)
    if mesh is not None:
        if (dp_rank, dp_size) != (None, None):
            raise WrongValueError(f"{where}: got mesh, dp_rank={dp_rank} and dp_size={dp_size}; pass mesh= alone")
        return _of_mesh(where, mesh, group)
    if dp_size is not None and (dp_rank is not None or dp_size == 1):
        return DataRank(dp_rank or 0, dp_size, group)
    if (dp_rank, dp_size) != (None, None):
        raise WrongValueError(f"{where}: got dp_rank={dp_rank} and dp_size={dp_size}, expected both or none; {_HOW}")
    if group is not None:
        return DataRank(dist.get_rank(group), dist.get_world_size(group), group)
    return _of_job(where)


def _of_mesh(where: str, mesh: DeviceMesh, group: dist.ProcessGroup | None) -> DataRank:
    check_argument(where, "mesh", mesh, DeviceMesh, "a DeviceMesh of the data-parallel ranks, such as mesh['dp']")
    others = [axis for axis in mesh.mesh_dim_names or () if is_model_parallel(axis)]
    if others:
        raise WrongValueError(
            f"{where}: got a mesh with the axis {', '.join(others)}, whose ranks get the same samples; pass the "
            "data-parallel part, such as mesh=mesh['dp']"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WrongValueError(f"{where}: this rank is not on {mesh}; make the loader on its ranks only")
    if group is None and mesh.ndim == 1:
        group = mesh.get_group()
    return DataRank(row_major_position(coordinate, mesh.shape), mesh.size(), group)


def _of_job(where: str) -> DataRank:
    check_job_is_joined(where, f"or {_HOW}")
    if not (dist.is_available() and dist.is_initialized()):
        return DataRank(0, 1, None)
    axes = [name.removeprefix("mesh_") for name in groups_of_some_ranks()]
    if not all(map(is_data_parallel, axes)):
        raise WrongValueError(
            f"{where}: got no data-parallel rank, and not all {dist.get_world_size()} ranks of this job are known to "
            f"get samples of their own: it has process groups of some of them ({', '.join(axes)}); {_HOW}"
        )
    return DataRank(dist.get_rank(), dist.get_world_size(), None)
