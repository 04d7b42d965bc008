"""Planners of several ranks driven by hand in one process, in the order in which DCP calls them; no process group."""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from reference import Step, dtensor_steps, index_tensor, shard_steps
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.planners import save_planner
from torchtitan_ext.ranks.exchange import scope_ranks


@dataclass
class Saved:
    """What a save left behind: the metadata, the bytes or tensor of every written index, and who wrote it."""

    metadata: Metadata
    values: dict[MetadataIndex, torch.Tensor | bytes]
    writers: dict[MetadataIndex, int]


@dataclass
class Loaded:
    """What each rank read, and its planner."""

    items: list[list[ReadItem]]
    planners: list[tte.LoadPlanner]


def mesh_at(rank: int, mesh_shape: Sequence[int], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of ranks 0, 1, ... as `rank` sees it."""
    ranks = torch.arange(torch.Size(mesh_shape).numel()).view(*mesh_shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def shard_at(
    rank: int, whole: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], steps: Sequence[Step]
) -> DTensor:
    """The DTensor of one simulated rank, cut by the oracle."""
    mesh = mesh_at(rank, mesh_shape)
    index = shard_steps(index_tensor(whole.shape), mesh_shape, tuple(mesh.get_coordinate() or ()), steps)
    local = whole.flatten()[index.flatten()].view(index.shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def shards(
    whole: torch.Tensor, mesh_shape: Sequence[int], *placements: Placement, steps: Sequence[Step] | None = None
) -> list[dict[str, Any]]:
    """One state per rank of the mesh, each with its shard as ``w``; cut as DTensor reads the placements by default."""
    steps = dtensor_steps(placements) if steps is None else steps
    ranks = range(torch.Size(mesh_shape).numel())
    return [{"w": shard_at(rank, whole, mesh_shape, placements, steps)} for rank in ranks]


def sent(value: Any) -> Any:
    """What arrives on another rank."""
    return pickle.loads(pickle.dumps(value))


def save(
    states: Sequence[dict[str, Any]],
    make: Callable[[], tte.SavePlanner] = tte.SavePlanner,
    *,
    storage_data: Any = None,
) -> Saved:
    """Saves one state per rank; the first rank coordinates.

    Args:
        storage_data: What a storage writer puts into the local plans.
    """
    planners = [make() for _ in states]
    plans = []
    # Unless the test says how large the world is.
    ranks = (
        mock.Mock(return_value=list(range(len(states))))
        if save_planner.scope_ranks is scope_ranks
        else save_planner.scope_ranks
    )
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        with mock.patch.object(save_planner, "scope_ranks", ranks):
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plan = planner.create_local_plan()
        plans.append(sent(plan if storage_data is None else replace(plan, storage_data=storage_data)))
    global_plans, metadata = planners[0].create_global_plan(plans)
    values: dict[MetadataIndex, torch.Tensor | bytes] = {}
    writers: dict[MetadataIndex, int] = {}
    for rank, (planner, plan) in enumerate(zip(planners, global_plans, strict=True)):
        final = planner.finish_plan(sent(plan))
        for item in final.items:
            data = planner.resolve_data(item)
            assert item.index not in values, f"{item.index} is written by ranks {writers[item.index]} and {rank}"
            writers[item.index] = rank
            if item.type == WriteItemType.BYTE_IO:
                values[item.index] = data.getvalue()
            else:
                assert tuple(data.shape) == tuple(item.tensor_data.chunk.sizes)
                values[item.index] = data.clone()
    return Saved(sent(metadata), values, writers)


def load(
    saved: Saved | Sequence[Saved],
    states: Sequence[dict[str, Any]],
    make: Callable[[], tte.LoadPlanner] = tte.LoadPlanner,
) -> Loaded:
    """Loads into one state per rank, in place; the first rank coordinates.

    Args:
        saved: What all ranks read, or one per rank: what each saved for itself.
    """
    sources = [saved] * len(states) if isinstance(saved, Saved) else saved
    planners = [make() for _ in states]
    plans = []
    for rank, (planner, state, source) in enumerate(zip(planners, states, sources, strict=True)):
        planner.set_up_planner(state, sent(source.metadata), is_coordinator=rank == 0)
        plans.append(sent(planner.create_local_plan()))
    items = []
    for planner, plan, source in zip(planners, planners[0].create_global_plan(plans), sources, strict=True):
        final = planner.finish_plan(sent(plan))
        items.append(final.items)
        for item in final.items:
            value = source.values[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                assert isinstance(value, bytes)
                planner.load_bytes(item, io.BytesIO(value))
                continue
            assert isinstance(value, torch.Tensor)
            target = planner.resolve_tensor(item)
            target.copy_(_box(value, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
    return Loaded(items, planners)


def _box(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
