"""One DTensor in another layout, on the same or another mesh, and its gradient back."""

from typing import Any

import pytest
import torch
from models import local_of
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext.errors import LayoutError
from torchtitan_ext.transfer import redistribute


def whole_tensor(rows: int = 33) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))


PLACEMENTS = [
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Replicate()),
]


def every_pair(rank: int, world_size: int) -> None:
    mesh, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    whole = whole_tensor()
    for source in PLACEMENTS:
        dtensor = tte.full.distribute_tensor(whole, mesh, source)
        for target in PLACEMENTS:
            moved = redistribute(dtensor, mesh, target)
            assert moved.placements == target and same_bits(tte.full_tensor(moved), whole)
        moved = redistribute(dtensor, line, [Shard(0)])
        assert moved.device_mesh == line and same_bits(tte.full_tensor(moved), whole)


def test_every_pair_of_placements(run_world: Any) -> None:
    run_world(4, every_pair)


def to_other_ranks(rank: int, world_size: int) -> None:
    first = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False)
    second = DeviceMesh("cpu", torch.tensor([3, 2, 1]), _init_backend=False)
    whole = whole_tensor(7)
    local = whole.chunk(2)[rank] if rank < 2 else whole.new_empty(0)
    dtensor = DTensor.from_local(local, first, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    moved = redistribute(dtensor, second, [Shard(0)])
    expected = {3: whole[:3], 2: whole[3:6], 1: whole[6:], 0: whole.new_empty(0)}[rank]
    assert same_bits(local_of(moved), expected)


def test_meshes_of_other_ranks(run_world: Any) -> None:
    run_world(4, to_other_ranks)


def gradients(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = whole_tensor()
    weights = torch.arange(float(whole.numel())).view_as(whole)
    for source in [(Shard(0), Shard(0)), (_StridedShard(0, split_factor=2), Shard(0))]:
        leaf = tte.full.distribute_tensor(whole, mesh, source).requires_grad_()
        moved = redistribute(leaf * 2, mesh, (Replicate(), Shard(1)))
        (moved * tte.full.distribute_tensor(weights, mesh, (Replicate(), Shard(1)))).sum().backward()
        assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == source
        assert torch.equal(tte.full_tensor(leaf.grad), weights * 2)


def test_gradients_come_back_in_the_layout_of_the_input(run_world: Any) -> None:
    run_world(4, gradients)


def refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    dtensor = tte.full.distribute_tensor(whole_tensor(), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(LayoutError, match="Partial"):
        redistribute(partial, mesh, [Shard(0)])
    with pytest.raises(TypeError, match="redistribute: got dtensor=a Tensor"):
        redistribute(torch.ones(2), mesh, [Shard(0)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="redistribute: placements: got 2, expected one per axis of the mesh, 1"):
        redistribute(dtensor, mesh, [Shard(0), Shard(0)])


def test_what_is_refused(run_world: Any) -> None:
    run_world(2, refused)
