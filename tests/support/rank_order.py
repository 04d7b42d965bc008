"""Groups and meshes whose process groups keep the order of their ranks: `DeviceMesh(preserve_rank_order=True)`.

Torch before 2.15 sorts the ranks of each group. There it is kept from that while a group is made.
"""

import inspect
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

KEEPS_ORDER = "preserve_rank_order" in inspect.signature(DeviceMesh.__init__).parameters


def ordered_group(ranks: Sequence[int]) -> Any:
    """Rank ``i`` of the group is ``ranks[i]``. All ranks of the world call it, as ``dist.new_group``."""
    with patch("torch.distributed.distributed_c10d.sorted", list, create=True):
        return dist.new_group(list(ranks))


def ordered_mesh(ranks: Any, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of several axes; along each of them the group has the order of the mesh."""
    if KEEPS_ORDER:
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, preserve_rank_order=True)
    with patch("torch.distributed.distributed_c10d.sorted", list, create=True):
        return DeviceMesh("cpu", ranks, mesh_dim_names=names)
