"""Layouts against the oracle: index tensors cut with the real torch.chunk, and DTensor's own splitting."""

import itertools

import pytest
import reference
import torch
from agreement_oracle import missing_ranks, replica_key
from hypothesis import given, settings
from hypothesis import strategies as st
from tier import num_cases
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_ext import _core, ops
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import (
    LocalShard,
    MeshLayout,
    ShardReport,
    decide,
    local_shard,
    part_of_shard,
)

# `make soak` multiplies the number of random layouts.


@st.composite
def layouts(draw):
    """Global shape, mesh shape, steps and a coordinate."""
    shape = draw(st.lists(st.integers(0, 17), min_size=1, max_size=3))
    mesh_shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axes = draw(st.permutations(range(len(mesh_shape))))
    sharding = axes[: draw(st.integers(0, len(axes)))]
    steps = [
        reference.Step(axis, draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 1, 1, 2, 3, 5])))
        for axis in sharding
    ]
    coordinate = tuple(draw(st.integers(0, size - 1)) for size in mesh_shape)
    return tuple(shape), tuple(mesh_shape), steps, coordinate


def held_elements(shape: tuple[int, ...], shard: LocalShard) -> torch.Tensor:
    """int64, of the shard's shape: the position in the global tensor of every element, from its chunks."""
    whole = reference.index_tensor(shape)
    held = torch.full(shard.sizes, -1)
    for chunk in shard.chunks:
        source, target = whole, held
        for dim, (offset, local_offset, size) in enumerate(
            zip(chunk.offsets, chunk.local_offsets, chunk.sizes, strict=True)
        ):
            source, target = source.narrow(dim, offset, size), target.narrow(dim, local_offset, size)
        target.copy_(source)
    return held


@settings(max_examples=num_cases(10_000, 0.1), deadline=None)
@given(layouts())
def test_a_rank_holds_what_torch_chunk_leaves_it(layout):
    shape, mesh_shape, steps, coordinate = layout
    expected = reference.shard_steps(reference.index_tensor(shape), mesh_shape, coordinate, steps)
    shard = local_shard(shape, mesh_shape, [(step.axis, step.dim, step.split_factor) for step in steps], coordinate)
    assert shard.sizes == tuple(expected.shape)
    assert torch.equal(held_elements(shape, shard), expected)
    assert all(0 not in chunk.sizes for chunk in shard.chunks)


@settings(max_examples=num_cases(5_000, 0.1), deadline=None)
@given(layouts())
def test_the_ranks_cover_every_element_once_per_replica(layout):
    shape, mesh_shape, steps, _ = layout
    plain_steps = [(step.axis, step.dim, step.split_factor) for step in steps]
    sharding = {step.axis for step in steps}
    replicating = [axis for axis in range(len(mesh_shape)) if axis not in sharding]
    boxes = [
        chunk[:2]
        for coordinate, (_, chunks) in zip(
            reference.coordinates(mesh_shape), _core.all_shards(shape, mesh_shape, plain_steps), strict=True
        )
        if all(coordinate[axis] == 0 for axis in replicating)
        for chunk in chunks
    ]
    assert _core.cover_defect(shape, boxes) is None


PLACEMENTS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]


def plain(placements):
    """Placements as a ShardReport keeps them."""
    return tuple(
        (-1, 1) if isinstance(p, Replicate) else (p.dim, int(getattr(p, "split_factor", 1))) for p in placements
    )


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (4, 2), (3, 2), (2, 3), (2, 2, 2)])
def test_left_to_right_is_what_dtensor_splits(mesh_shape):
    for placements in itertools.product(PLACEMENTS, repeat=len(mesh_shape)):
        steps = _core.read_placements(plain(placements), mesh_shape, "left_to_right")
        for rows in (0, 1, 5, 8, 9, 12, 17):
            shape = (rows, 5)
            for coordinate in reference.coordinates(mesh_shape):
                expected = reference.index_tensor(shape)
                for axis, placement in enumerate(placements):
                    if not isinstance(placement, Replicate):
                        parts, _ = placement._split_tensor(expected, mesh_shape[axis], with_padding=False)
                        expected = parts[coordinate[axis]]
                shard = local_shard(shape, mesh_shape, steps, coordinate)
                assert torch.equal(held_elements(shape, shard), expected), (placements, rows, coordinate)


@settings(max_examples=num_cases(3_000, 0.1), deadline=None)
@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_nested_is_what_fsdp2_builds_over_tp(rows, dp, tp, blocks):
    tp_placement = Shard(0) if blocks == 1 else _StridedShard(0, split_factor=blocks)
    placements = [Shard(0) if tp == 1 else _StridedShard(0, split_factor=tp), tp_placement]
    steps = _core.read_placements(plain(placements), (dp, tp), "nested")
    expected = reference.indices_by_coordinate((rows, 3), (dp, tp), reference.fsdp_steps(placements, fsdp_axis=0))
    for coordinate, held in expected.items():
        if tp == 1 and blocks > 1:
            continue  # Shard(0), _StridedShard: nothing is nested here
        assert torch.equal(held_elements((rows, 3), local_shard((rows, 3), (dp, tp), steps, coordinate)), held)


def reports_of(shape, mesh_shape, placements, steps, *, order=None):
    mesh = MeshLayout(mesh_shape, tuple(range(torch.Size(mesh_shape).numel())), ("dp", "tp"))
    held = reference.indices_by_coordinate(shape, mesh_shape, steps)
    return [
        ShardReport(tuple(shape), mesh, coordinate, plain(placements), tuple(indices.shape), order)
        for coordinate, indices in held.items()
    ]


@pytest.mark.parametrize("rows", [9, 17, 25, 33, 50257, 32001, 128257])
def test_uneven_fsdp_over_tp_is_told_by_the_local_shapes(rows):
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for steps in (reference.fsdp_steps(placements, 0), reference.dtensor_steps(placements)):
        reports = reports_of((rows, 1), (4, 2), placements, steps)
        assert decide("w", reports) == tuple((s.axis, s.dim, s.split_factor) for s in steps)


def test_a_doubt_names_both_readings_and_the_remedy():
    placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    problem = decide("wqkv", reports_of((24, 2), (2, 2), placements, reference.fsdp_steps(placements, 0)))
    assert isinstance(problem, Problem) and problem.kind == "layout_in_doubt"
    assert "_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)" in problem.detail
    assert "tp on dim 0 in 3 blocks, then dp on dim 0" in problem.detail
    assert "dp on dim 0 in 2 blocks, then tp on dim 0 in 3 blocks" in problem.detail
    assert "layouts={'wqkv': ShardOrder(...)}" in problem.detail


def test_a_stated_order_leaves_no_doubt():
    placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    steps = reference.fsdp_steps(placements, 0)
    order = tuple((step.axis, step.dim, step.split_factor) for step in steps)
    assert decide("wqkv", reports_of((24, 2), (2, 2), placements, steps, order=order)) == order


def test_local_shapes_that_fit_nothing_name_the_rank():
    reports = reports_of((8, 2), (2, 2), [Shard(0), Shard(1)], [reference.Step(0, 0), reference.Step(1, 1)])
    reports[3] = ShardReport((8, 2), reports[3].mesh, (1, 1), reports[3].placements, (5, 1))
    problem = decide("w", reports)
    assert isinstance(problem, Problem) and problem.kind == "layout_matches_nothing"
    assert "rank 3 holds a local tensor of shape (5, 1)" in problem.detail
    assert "it would hold (4, 1)" in problem.detail


def test_a_split_factor_of_an_impossible_kind_is_a_problem():
    mesh = MeshLayout((2,), (0, 1), None)
    report = ShardReport((8,), mesh, (0,), ((3, 1),), (4,))
    problem = decide("w", [report])
    assert isinstance(problem, Problem) and "dim 3 is outside a tensor of 1 dims" in problem.detail


def test_missing_ranks_are_global_ranks():
    mesh = MeshLayout((2, 2), (4, 5, 6, 7), None)
    reports = [ShardReport((8,), mesh, at, ((0, 1), (-1, 1)), (4,)) for at in ((0, 0), (1, 1))]
    assert missing_ranks(reports) == [5, 6]
    assert [replica_key(report) for report in reports] == [(0, 0), (1, 0)]


def test_a_part_of_a_shard_holds_the_elements_of_the_box_of_the_local_tensor() -> None:
    """Of every box of a shard of several chunks."""
    whole = torch.arange(24 * 5).view(24, 5)
    steps = ((0, 0, 3), (1, 1, 1))  # interleaved rows, then columns
    for coordinate in itertools.product(range(2), range(2)):
        shard = local_shard((24, 5), (2, 2), steps, coordinate)
        local = ops.pack_shard(whole, shard)
        assert len(shard.chunks) > 1
        of_dims = [list(itertools.combinations(range(size + 1), 2)) for size in shard.sizes]
        for (top, bottom), (left, right) in itertools.product(*of_dims):
            part = part_of_shard(shard, (top, left), (bottom - top, right - left))
            assert torch.equal(ops.pack_shard(whole, part), local[top:bottom, left:right])
