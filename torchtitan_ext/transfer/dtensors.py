"""One DTensor in another layout: right where ``DTensor.redistribute`` refuses or garbles uneven and strided shards."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from torchtitan_ext.errors import check_argument
from torchtitan_ext.full.tensors import as_dtensor, placed_shard
from torchtitan_ext.layout.dtensor import is_on_mesh, local_tensor
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.transfer.state_dicts import plan_reshard

_KEY = "tensor"  # messages give this name to it


def redistribute(
    dtensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
    source_layout: ShardOrder | None = None,
    layout: ShardOrder | None = None,
) -> DTensor:
    """The tensor on another mesh, or with other placements. Differentiable. Collective over ``group``.

    Unlike ``DTensor.redistribute`` it is right for every layout that the planners know, moves each element once and
    never makes the global tensor, and its meshes may be of other ranks of the group.

    Args:
        dtensor: Of any dtype and layout but Partial. A rank outside its mesh passes it all the same, with an empty
            local tensor, as ``DTensor.from_local`` makes it there.
        mesh: Of the result; all ranks of the group call, those outside of it get an empty local tensor.
        placements: One per axis of ``mesh``: Shard, _StridedShard or Replicate.
        group: Holds both meshes; the default group if left out.
        source_layout, layout: The order in which axes were (are to be) sharded, where placements cannot express it.

    Returns:
        A new DTensor. Its gradient comes back in the layout of ``dtensor``; parts of a Partial gradient are summed.

    Raises:
        StateRefusedError: (a subclass) A layout is in doubt or unknown; the same on every rank.
    """
    check_argument("redistribute", "dtensor", dtensor, DTensor, "a DTensor")
    check_argument("redistribute", "mesh", mesh, DeviceMesh, "a DeviceMesh")
    for name, order in (("source_layout", source_layout), ("layout", layout)):
        check_argument("redistribute", name, order, (ShardOrder, NoneType), "a ShardOrder")
    result: DTensor = _Redistribute.apply(dtensor, mesh, tuple(placements), group, source_layout, layout)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        group: dist.ProcessGroup | None,
        source_layout: ShardOrder | None,
        layout: ShardOrder | None,
    ) -> DTensor:
        ctx.source = dtensor.device_mesh, dtensor.placements
        ctx.placements, ctx.group, ctx.layouts = placements, group, (source_layout, layout)
        return _moved(dtensor, mesh, placements, group, source_layout, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor | None, ...]:
        (grad,) = grads
        whole = tuple(Replicate() if placement.is_partial() else placement for placement in grad.placements)
        if whole != tuple(grad.placements):
            grad = grad.redistribute(placements=whole)
        to, of = ctx.layouts
        mesh, placements = ctx.source
        moved = _moved(grad, mesh, placements, ctx.group, of if whole == ctx.placements else None, to)
        return moved, None, None, None, None, None


def _moved(
    dtensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    group: dist.ProcessGroup | None,
    source_layout: ShardOrder | None,
    layout: ShardOrder | None,
) -> DTensor:
    shard = placed_shard("redistribute", dtensor.shape, mesh, placements, layout)
    like = local_tensor(dtensor)
    sizes = (0,) if shard is None else shard.sizes
    result = as_dtensor(torch.empty(sizes, dtype=like.dtype, device=like.device), dtensor.shape, mesh, placements)
    plan = plan_reshard(
        {_KEY: dtensor} if is_on_mesh(dtensor) else None,
        {_KEY: result} if is_on_mesh(result) else None,
        group,
        source_layouts=None if source_layout is None else {_KEY: source_layout},
        target_layouts=None if layout is None else {_KEY: layout},
    )
    plan.run()
    return result
