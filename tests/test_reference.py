"""The oracle against real PyTorch: DTensor's own arithmetic in one process. FSDP2 itself: distributed/test_stock.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    Step,
    assemble,
    coordinates,
    dtensor_steps,
    fsdp_steps,
    indices_by_coordinate,
    same_bits,
    shard_once,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def rows(shape: tuple[int, ...], mesh_shape: tuple[int, ...], steps: list[Step]) -> list[list[int]]:
    return [indices.tolist() for indices in indices_by_coordinate(shape, mesh_shape, steps).values()]


def test_worked_example_of_the_module() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    assert fsdp_steps(placements, fsdp_axis=0) == [Step(1, 0), Step(0, 0)]
    assert rows((5,), (2, 2), fsdp_steps(placements, fsdp_axis=0)) == [[0, 1], [3], [2], [4]]
    assert rows((5,), (2, 2), dtensor_steps(placements)) == [[0, 1], [3], [2], [4]]
    # From dp = 3 on the two readings differ.
    assert rows((7,), (3, 2), fsdp_steps(placements, fsdp_axis=0)) == [[0, 1], [4], [2, 3], [5], [], [6]]
    assert rows((7,), (3, 2), dtensor_steps(placements)) == [[0, 1], [4], [2, 3], [5], [6], []]


def test_missing_chunks_are_empty() -> None:
    assert rows((2,), (4,), [Step(0, 0)]) == [[0], [1], [], []]
    assert rows((0, 3), (2,), [Step(0, 0)]) == [[], []]
    assert rows((6,), (2,), [Step(0, 0, split_factor=3)]) == [[0, 2, 4], [1, 3, 5]]
    assert rows((4,), (2,), dtensor_steps([Replicate()])) == [[0, 1, 2, 3], [0, 1, 2, 3]]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5), st.integers(0, 1))
def test_one_step_is_what_strided_shard_does(size: int, axis_size: int, split_factor: int, dim: int) -> None:
    shape = (size, 2) if dim == 0 else (2, size)
    tensor = torch.arange(2 * size).view(shape)
    stock, _ = _StridedShard(dim, split_factor=split_factor)._split_tensor(tensor, axis_size, with_padding=False)
    for index in range(axis_size):
        assert torch.equal(shard_once(tensor, axis_size, index, dim, split_factor), stock[index])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_every_element_is_covered_once_per_replica(
    shape: list[int], mesh_shape: list[int], data: st.DataObject
) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(mesh_shape))), unique=True))
    steps = [Step(axis, data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3))) for axis in axes]
    indices = indices_by_coordinate(shape, mesh_shape, steps)
    num_replicas = len(coordinates(mesh_shape))
    for axis in axes:
        num_replicas //= mesh_shape[axis]
    counts = torch.bincount(torch.cat([index.flatten() for index in indices.values()]), minlength=1)
    assert set(counts.tolist()) <= {num_replicas, 0} and counts.sum() == num_replicas * torch.Size(shape).numel()


def test_assemble_puts_the_shards_together_and_notices_what_is_wrong() -> None:
    truth = torch.randn(5, 3)
    indices = indices_by_coordinate((5, 3), (2, 2), [Step(1, 0), Step(0, 1)])
    shards = {coordinate: truth.flatten()[index] for coordinate, index in indices.items()}
    assert same_bits(assemble((5, 3), shards, indices), truth)
    with pytest.raises(AssertionError, match="on no rank"):
        assemble((5, 3), {coordinate: shards[coordinate] for coordinate in [(0, 0), (1, 1)]}, indices)
    replicated = indices_by_coordinate((2,), (2,), [])
    with pytest.raises(AssertionError, match="differs from its replica"):
        assemble((2,), {(0,): torch.zeros(2), (1,): torch.ones(2)}, replicated)


def test_same_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert same_bits(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64))
    assert same_bits(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn))
