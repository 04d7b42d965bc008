"""`full_tensor` and `distribute_tensor`, on the layouts where stock is wrong or refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    HANDMADE,
    INTERLEAVED_QKV,
    HandMade,
    build_handmade,
    differences,
    handmade_truth,
    left_to_right,
    local_of,
    random_whole,
)
from reference import same_bits
from tier import of_at_most_four
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.full import tensors as full_tensors

LAYOUTS = of_at_most_four([*HANDMADE, INTERLEAVED_QKV], lambda layout: layout.world_size)


def stated(layout: HandMade) -> tte.layout.ShardOrder | None:
    if not layout.must_be_stated:
        return None
    return tte.layout.ShardOrder(tuple((step.axis, step.dim, step.split_factor) for step in layout.steps))


def gather_handmade(rank: int, world_size: int, layout: HandMade) -> list[str]:
    truth = handmade_truth()
    state = build_handmade(layout, truth)
    full = {name: tte.full_tensor(tensor, layout=stated(layout)) for name, tensor in state.items()}
    return differences(full, truth)


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_full_tensor(run_world, layout: HandMade) -> None:
    assert run_world(layout.world_size, gather_handmade, layout) == [[]] * layout.world_size


def gather_in_parts(rank: int, world_size: int, layout: HandMade) -> list[str]:
    """Buffers of a few elements: every tensor goes in many parts, of other numbers per rank."""
    kept = full_tensors._GATHER_BYTES
    full_tensors._GATHER_BYTES = 40
    try:
        return gather_handmade(rank, world_size, layout)
    finally:
        full_tensors._GATHER_BYTES = kept


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_full_tensor_in_parts(run_world, layout: HandMade) -> None:
    assert run_world(layout.world_size, gather_in_parts, layout) == [[]] * layout.world_size


def peak_bytes(rank: int, world_size: int, num_bytes: int) -> tuple[float, float, bool]:
    """How much memory a gather, and making a DTensor, take at most, in full tensors."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(num_bytes // 8, dtype=torch.int64).view(-1, 512)
    dtensor, distributing = with_peak(lambda: tte.full.distribute_tensor(whole, mesh, [Shard(0)]))
    full, gathering = with_peak(lambda: tte.full_tensor(dtensor))
    return distributing / num_bytes, gathering / num_bytes, torch.equal(full, whole)


def with_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    result = call()
    return result, memory_bytes("VmHWM") - before


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


@pytest.mark.nightly("memory")
def test_one_full_tensor_is_held(run_world) -> None:
    answers = run_world(2, peak_bytes, 192 << 20)
    for rank, (distributing, gathering, is_right) in enumerate(answers):
        assert is_right
        assert distributing < (0.75 if rank == 0 else 1.75)  # the shard; elsewhere what is received too
        assert gathering < 1.7  # the result and buffers of 32 MiB


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="^full_tensor: got tensor=a list, expected a tensor$"):
        tte.full_tensor([torch.zeros(2)])
    with pytest.raises(TypeError, match="^full_tensor: got layout='.*', expected a ShardOrder$"):
        tte.full_tensor(torch.zeros(2), layout="nested")
    with pytest.raises(TypeError, match="^distribute_tensor: got full=a list, expected a tensor$"):
        tte.full.distribute_tensor([1.0], None, [])
    with pytest.raises(TypeError, match="^distribute_tensor: got mesh=a list, expected a DeviceMesh$"):
        tte.full.distribute_tensor(torch.zeros(2), [Shard(0)], None)


def save_one_element(rank: int, world_size: int, path: Path) -> list[float]:
    """One element whose last stride is not 1, plain and as a shard, saved and loaded."""
    mesh = init_device_mesh("cpu", (world_size,))
    column = torch.arange(2.0).view(1, 2)[:, 1]
    shard = DTensor.from_local(column, mesh, [Shard(0)], run_check=False)
    tte.save({"plain": column, "shard": shard}, path)
    target = {"plain": torch.zeros(1), "shard": torch.zeros(world_size)}
    tte.load(target, path)
    assert tte.fingerprint({"w": column}) == tte.fingerprint({"w": column.clone()})
    return [*target["plain"].tolist(), *target["shard"].tolist(), *tte.full_tensor(shard).tolist()]


def test_one_element_of_an_odd_stride(run_world, tmp_path: Path) -> None:
    assert run_world(2, save_one_element, tmp_path / "checkpoint") == [[1.0] * 5] * 2


def refused_placements(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for placements, error, text in [
        (Shard(0), TypeError, "got placements=a Shard, expected a list of placements"),
        ([Shard], TypeError, "got placements=the class"),
        ([0], TypeError, "got placements=0, expected Shard, Replicate or _StridedShard"),
        ([Shard(0), Replicate()], ValueError, "placements: got 2, expected one per axis of the mesh, 1"),
    ]:
        with pytest.raises(error, match=text):
            tte.full.distribute_tensor(torch.zeros(2), mesh, placements)
    dtensor = tte.full.distribute_tensor(torch.zeros(2), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="got full=a DTensor, expected a plain tensor"):
        tte.full.distribute_tensor(dtensor, mesh, [Shard(0)])


def test_placements_that_are_none(run_world) -> None:
    run_world(1, refused_placements)


def test_a_plain_tensor_is_copied() -> None:
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.arange(2.0).view(1, 2)[:, 1], torch.arange(3).expand(2, 3)):
        full = tte.full_tensor(tensor)
        assert torch.equal(full, tensor) and full.is_contiguous()
        assert full.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def refused_interleaved(rank: int, world_size: int) -> str:
    state = build_handmade(INTERLEAVED_QKV, {"wqkv": random_whole((24, 2), torch.float32, 0)})
    with pytest.raises(tte.errors.LayoutError) as caught:
        tte.full_tensor(state["wqkv"])
    return str(caught.value)


def test_full_tensor_refuses_what_it_cannot_tell(run_world) -> None:
    texts = run_world(4, refused_interleaved)
    assert len(set(texts)) == 1
    assert "two ways" in texts[0] and "layouts=" in texts[0]


def gather_literal(rank: int, world_size: int) -> list[str]:
    layout = left_to_right("literal", INTERLEAVED_QKV.mesh_shape, *INTERLEAVED_QKV.placements)
    truth = handmade_truth()
    tensors = build_handmade(layout, truth)
    for tensor in tensors.values():
        tensor._spec.use_strided_shard_as_shard_order = False
    return differences({name: tte.full_tensor(tensor) for name, tensor in tensors.items()}, truth)


def test_a_spec_that_says_so_is_read_literally(run_world) -> None:
    """Views of DTensors say so (torch 2.13): their strided placements mean DTensor's own arithmetic."""
    assert run_world(4, gather_literal) == [[]] * 4


def refused_dtypes(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.ones(2, dtype=[torch.float32, torch.bfloat16][rank])
    with pytest.raises(tte.errors.ReplicaMismatchError) as caught:
        tte.full_tensor(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    return str(caught.value)


def test_ranks_that_disagree_are_told_so(run_world) -> None:
    first, second = run_world(2, refused_dtypes)
    assert first == second and "rank 0 has dtype torch.float32, rank 1 has dtype torch.bfloat16" in first


def distribute_handmade(rank: int, world_size: int, layout: HandMade, src_data_rank: int | None) -> list[str]:
    truth = handmade_truth()
    axes = tuple(f"axis{axis}" for axis in range(len(layout.mesh_shape)))
    mesh = init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=axes)
    state = {}
    for name, whole in truth.items():
        mine = whole if rank == 0 or src_data_rank is None else torch.zeros_like(whole)
        state[name] = tte.full.distribute_tensor(
            mine, mesh, layout.placements, layout=stated(layout), src_data_rank=src_data_rank
        )
        assert (
            not whole.numel() or local_of(state[name]).untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
        )
    return differences(state, truth, list(layout.steps))


# The two readings of [_StridedShard, Shard] differ: a new tensor is made in the nested one.
MADE_NESTED = [layout for layout in LAYOUTS if layout.name != "strided_dtensor"]


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("src_data_rank", [0, None])
@pytest.mark.parametrize("layout", MADE_NESTED, ids=lambda layout: layout.name)
def test_distribute_tensor(run_world, layout: HandMade, src_data_rank: int | None) -> None:
    answers = run_world(layout.world_size, distribute_handmade, layout, src_data_rank)
    assert answers == [[]] * layout.world_size


def round_trip_with_grad(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = nn.Parameter(random_whole((9, 3), torch.float32, 0))
    dtensor = tte.full.distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
    local = dtensor.to_local()
    version = local._version
    full = tte.full_tensor(dtensor)
    return [
        isinstance(dtensor, DTensor),
        dtensor.requires_grad,
        full.requires_grad,
        local._version == version,
        same_bits(full, whole),
    ]


def test_requires_grad_goes_along(run_world) -> None:
    assert run_world(4, round_trip_with_grad) == [[True, True, False, True, True]] * 4
