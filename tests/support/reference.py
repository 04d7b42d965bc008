"""The slow and obvious oracle of layouts: which element of the global tensor lies where, by moving index tensors about.

It knows nothing of the code under test. A tensor of shape (5,) whose elements are their own positions, [0, 1, 2, 3, 4],
is cut with the real `torch.chunk` exactly as the real tensor would be; what is left on a coordinate are the positions
that it holds. Sharding (5,) over dp = 2 and tp = 2, TP first, as FSDP2 does it (the nested order):

    tp 0: [0, 1, 2] -> dp 0: [0, 1]  dp 1: [2]
    tp 1: [3, 4]    -> dp 0: [3]     dp 1: [4]

and in DTensor's reading of the same placements, [_StridedShard(0, split_factor=2), Shard(0)], from left to right:

    dp 0: [0, 1] + [3] = [0, 1, 3] -> tp 0: [0, 1]  tp 1: [3]
    dp 1: [2] + [4]    = [2, 4]    -> tp 0: [2]     tp 1: [4]
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One act of sharding: cut dim into `split_factor` parts, each into as many as the axis has coordinates."""

    axis: int
    dim: int
    split_factor: int = 1


def index_tensor(shape: Sequence[int]) -> torch.Tensor:
    """int64, of the given shape: every element is its own position in the flattened tensor."""
    return torch.arange(math.prod(shape)).view(tuple(shape))


def chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty tensors for the chunks that it leaves out."""
    chunks = list(torch.chunk(tensor, num_chunks, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (num_chunks - len(chunks))


def shard_once(tensor: torch.Tensor, axis_size: int, index: int, dim: int, split_factor: int = 1) -> torch.Tensor:
    """What coordinate `index` of an axis keeps: its chunk of each of the `split_factor` parts, joined."""
    parts = chunk(tensor, split_factor, dim)
    return torch.cat([chunk(part, axis_size, dim)[index] for part in parts], dim)


def shard_steps(
    tensor: torch.Tensor, mesh_shape: Sequence[int], coordinate: Coordinate, steps: Sequence[Step]
) -> torch.Tensor:
    """What a coordinate keeps of a tensor when the axes of a mesh are applied in the order of `steps`."""
    for step in steps:
        tensor = shard_once(tensor, mesh_shape[step.axis], coordinate[step.axis], step.dim, step.split_factor)
    return tensor


def dtensor_steps(placements: Sequence[Placement]) -> list[Step]:
    """DTensor's own reading: the placements from left to right, each applied to what the one before it left."""
    steps = []
    for axis, placement in enumerate(placements):
        assert not isinstance(placement, Partial), "a Partial has no shards"
        if isinstance(placement, _StridedShard):
            steps.append(Step(axis, placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            steps.append(Step(axis, placement.dim))
        else:
            assert isinstance(placement, Replicate)
    return steps


def fsdp_steps(placements: Sequence[Placement], fsdp_axis: int) -> list[Step]:
    """What `fully_shard` really builds: the other axes first, as DTensor reads them, then one plain chunk."""
    others = [step for step in dtensor_steps(placements) if step.axis != fsdp_axis]
    own = placements[fsdp_axis]
    return others if isinstance(own, Replicate) else [*others, Step(fsdp_axis, own.dim)]


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    """All coordinates of a mesh, in the order of the ranks of a mesh that `init_device_mesh` makes."""
    return list(itertools.product(*(range(size) for size in mesh_shape)))


def indices_by_coordinate(
    shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[Step]
) -> dict[Coordinate, torch.Tensor]:
    """The index tensor of every coordinate."""
    whole = index_tensor(shape)
    return {coordinate: shard_steps(whole, mesh_shape, coordinate, steps) for coordinate in coordinates(mesh_shape)}


def assemble(
    shape: Sequence[int], shards: Mapping[Coordinate, torch.Tensor], indices: Mapping[Coordinate, torch.Tensor]
) -> torch.Tensor:
    """The global tensor that the shards hold together. Asserts that they cover it and that replicas are equal."""
    first = next(iter(shards.values()))
    flat = first.new_zeros(math.prod(shape))
    is_covered = torch.zeros(math.prod(shape), dtype=torch.bool)
    for coordinate, shard in shards.items():
        index = indices[coordinate]
        assert shard.shape == index.shape, f"{coordinate}: got {tuple(shard.shape)}, expected {tuple(index.shape)}"
        is_seen = is_covered[index.flatten()]
        assert same_bits(flat[index.flatten()][is_seen], shard.flatten()[is_seen]), (
            f"{coordinate} differs from its replica"
        )
        flat[index.flatten()] = shard.flatten()
        is_covered[index.flatten()] = True
    assert bool(is_covered.all()), f"elements {(~is_covered).nonzero().flatten().tolist()[:10]} are on no rank"
    return flat.view(tuple(shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, 1-d: the bytes of the tensor."""
    # A clone: one element counts as contiguous with any stride.
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes. NaN equals the same NaN, and -0.0 differs from 0.0."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(as_bytes(left), as_bytes(right))
