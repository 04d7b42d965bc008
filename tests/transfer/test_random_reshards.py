"""Random layouts become other random layouts in the memory of the ranks: meshes of all ranks, of some, overlapping or
apart, in any order of ranks, several boxes, empty shards, every dtype by bits."""

import os
import random
from typing import Any

import pytest
import torch
from models import DTYPES, HandMade, differences, distribute_by_index, poison, random_whole
from reference import Step, dtensor_steps
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torchtitan_ext as tte

NUM_TENSORS = 30
ALL_DTYPES = [
    *DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64, torch.complex128,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
MESH_SHAPES = {
    world_size: [shape for shape in shapes if torch.Size(shape).numel() <= world_size]
    for world_size in (2, 5, 8)
    for shapes in [[(1,), (2,), (3,), (5,), (8,), (1, 2), (2, 2), (4, 2), (2, 3), (2, 2, 2), (2, 1, 2)]]
}


def random_layout(draw: random.Random, world_size: int, num_dims: int) -> HandMade:
    """What placements say from left to right, FSDP2's order over one other axis, or an order that must be stated."""
    mesh_shape = draw.choice(MESH_SHAPES[world_size])
    dim = draw.randrange(num_dims)
    kind = draw.choice(["placements", "fsdp", "strided", "stated"])
    if kind == "fsdp" and len(mesh_shape) == 2:
        placements: list[Placement] = [_StridedShard(dim, split_factor=mesh_shape[1]), Shard(dim)]
        return HandMade(kind, mesh_shape, tuple(placements), (Step(1, dim), Step(0, dim)))
    if kind == "strided" and len(mesh_shape) == 1:
        split_factor = draw.randint(2, 4)
        return HandMade(
            kind, mesh_shape, (_StridedShard(dim, split_factor=split_factor),), (Step(0, dim, split_factor),)
        )
    placements = [draw.choice([Replicate(), *map(Shard, range(num_dims))]) for _ in mesh_shape]
    steps = dtensor_steps(placements)
    if kind == "stated":
        draw.shuffle(steps)
        steps = [Step(step.axis, step.dim, draw.choice([1, 2, 3])) for step in steps]
    return HandMade(kind, mesh_shape, tuple(placements), tuple(steps), must_be_stated=kind == "stated")


def random_whole_tensor(draw: random.Random) -> torch.Tensor:
    shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 9, 12, 17, 24, 33]) for _ in range(draw.randint(1, 3)))
    return random_whole(shape, draw.choice(ALL_DTYPES), draw.randrange(2**31))


class State:
    """One side of a transfer on this rank."""

    def __init__(self, draw: random.Random, world_size: int, truth: dict[str, torch.Tensor]) -> None:
        self.tensors: dict[str, DTensor] = {}
        self.layouts = {name: random_layout(draw, world_size, whole.ndim) for name, whole in truth.items()}
        self.orders: dict[str, tte.ShardOrder] = {}
        for name, layout in self.layouts.items():
            ranks = draw.sample(range(world_size), layout.world_size)
            is_strided = draw.random() < 0.3
            mesh = DeviceMesh("cpu", torch.tensor(ranks).view(layout.mesh_shape), _init_backend=False)
            if mesh.get_coordinate() is None:
                continue
            self.tensors[name] = distribute_by_index(truth[name], mesh, layout)
            if is_strided:  # other strides than those of a new tensor
                local = self.tensors[name]._local_tensor
                local.set_(local.T.contiguous().T if local.dim() == 2 else torch.stack([local, local], -1)[..., 0])
            if layout.must_be_stated and layout.steps:
                self.orders[name] = tte.ShardOrder(
                    tuple((step.axis, step.dim, step.split_factor) for step in layout.steps)
                )


def reshard_random(rank: int, world_size: int, seeds: list[int]) -> list[str]:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        truth = {f"tensor_{index}": random_whole_tensor(draw) for index in range(NUM_TENSORS)}
        source, target = State(draw, world_size, truth), State(draw, world_size, truth)
        poison(target.tensors)
        plan = tte.plan_reshard(
            source.tensors or None,
            target.tensors or None,
            source_layouts=source.orders,
            target_layouts=target.orders,
            bucket_bytes=draw.choice([64, 256, 1 << 25]),
        )
        result = plan.run(version=seed)
        assert result.version == plan.version == seed
        for name, tensor in target.tensors.items():
            layout = target.layouts[name]
            found = differences({name: tensor}, {name: truth[name]}, list(layout.steps))
            lines += [f"seed {seed}, {line}: {source.layouts[name]} to {layout}" for line in found]
    return lines


@pytest.mark.parametrize("world_size", MESH_SHAPES)
def test_random_layouts(run_world: Any, world_size: int) -> None:
    seeds = list(range(int(os.environ.get("TTE_SOAK_RESHARDS", "4"))))
    assert run_world(world_size, reshard_random, seeds) == [[]] * world_size
