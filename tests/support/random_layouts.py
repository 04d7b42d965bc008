"""Random states of many tensors, each with a random layout on a mesh of its own."""

import random

import torch
from models import DTYPES, HandMade, distribute_by_index, random_whole
from reference import Step, dtensor_steps
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torchtitan_ext as tte

MESH_SHAPES = {
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    4: [(4,), (2, 2)],
    2: [(2,)],
    1: [(1,)],
}


ALL_DTYPES = [
    *DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64, torch.complex128,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
SUB_MESH_SHAPES = [(1,), (2,), (3,), (5,), (8,), (1, 2), (2, 2), (4, 2), (2, 3), (2, 2, 2), (2, 1, 2)]


def random_tensor(draw: random.Random) -> torch.Tensor:
    shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 9, 12, 17, 24, 33]) for _ in range(draw.randint(1, 3)))
    return random_whole(shape, draw.choice(ALL_DTYPES), draw.randrange(2**31))


class SideOfTransfer:
    """This rank's part of one side: each tensor on some of the ranks, in any order, some with odd strides.

    Attributes:
        tensors: Those that this rank has a part of.
        orders: Of these, the sharding orders that must be stated.
        layouts: Of all tensors.
    """

    def __init__(
        self, draw: random.Random, world_size: int, truth: dict[str, torch.Tensor], device: str = "cpu"
    ) -> None:
        mesh_shapes = [shape for shape in SUB_MESH_SHAPES if torch.Size(shape).numel() <= world_size]
        self.tensors: dict[str, DTensor] = {}
        self.layouts = {name: random_layout(draw, mesh_shapes, whole.ndim) for name, whole in truth.items()}
        self.orders: dict[str, tte.layout.ShardOrder] = {}
        for name, layout in self.layouts.items():
            ranks = draw.sample(range(world_size), layout.world_size)
            is_strided = draw.random() < 0.3
            mesh = DeviceMesh(device, torch.tensor(ranks).view(layout.mesh_shape), _init_backend=False)
            if mesh.get_coordinate() is None:
                continue
            self.tensors[name] = distribute_by_index(truth[name], mesh, layout)
            if is_strided:  # other strides than those of a new tensor
                local = self.tensors[name]._local_tensor
                local.set_(local.T.contiguous().T if local.dim() == 2 else torch.stack([local, local], -1)[..., 0])
            if layout.must_be_stated and layout.steps:
                self.orders[name] = tte.layout.ShardOrder(
                    tuple((step.axis, step.dim, step.split_factor) for step in layout.steps)
                )


def random_truth(seed: int, num_tensors: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    truth = {}
    for index in range(num_tensors):
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 9, 12, 17, 24, 33]) for _ in range(draw.randint(1, 3)))
        truth[f"tensor_{index}"] = random_whole(shape, draw.choice(DTYPES), seed * num_tensors + index)
    return truth


def random_layout(draw: random.Random, mesh_shapes: list[tuple[int, ...]], num_dims: int) -> HandMade:
    """What placements say from left to right, FSDP2's order over one other axis, or an order that must be stated."""
    mesh_shape = draw.choice(mesh_shapes)
    dim = draw.randrange(num_dims)
    kind = draw.choice(["placements", "fsdp", "strided", "stated"])
    if kind == "fsdp" and len(mesh_shape) == 2:
        placements: list[Placement] = [_StridedShard(dim, split_factor=mesh_shape[1]), Shard(dim)]
        return HandMade(kind, mesh_shape, tuple(placements), (Step(1, dim), Step(0, dim)))
    if kind == "strided" and len(mesh_shape) == 1:
        split_factor = draw.randint(2, 4)
        placements = [_StridedShard(dim, split_factor=split_factor)]
        return HandMade(kind, mesh_shape, tuple(placements), (Step(0, dim, split_factor),))
    placements = [draw.choice([Replicate(), *map(Shard, range(num_dims))]) for _ in mesh_shape]
    steps = dtensor_steps(placements)
    if kind == "stated":
        draw.shuffle(steps)
        steps = [Step(step.axis, step.dim, draw.choice([1, 2, 3])) for step in steps]
    return HandMade(kind, mesh_shape, tuple(placements), tuple(steps), must_be_stated=kind == "stated")


def build(
    truth: dict[str, torch.Tensor], layouts: dict[str, HandMade], device: str = "cpu"
) -> tuple[dict[str, DTensor], dict[str, tte.layout.ShardOrder]]:
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    state, orders = {}, {}
    for name, layout in layouts.items():
        if layout.mesh_shape not in meshes:
            meshes[layout.mesh_shape] = init_device_mesh(device, layout.mesh_shape)
        state[name] = distribute_by_index(truth[name], meshes[layout.mesh_shape], layout)
        if layout.must_be_stated and layout.steps:
            orders[name] = tte.layout.ShardOrder(
                tuple((step.axis, step.dim, step.split_factor) for step in layout.steps)
            )
    return state, orders


def random_layouts(seed: int, world_size: int, truth: dict[str, torch.Tensor]) -> dict[str, HandMade]:
    draw = random.Random(seed)
    return {name: random_layout(draw, MESH_SHAPES[world_size], whole.ndim) for name, whole in truth.items()}
