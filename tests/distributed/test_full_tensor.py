"""`full_tensor`, `distribute_tensor` and full state dicts, on the layouts where stock is wrong or refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    HANDMADE,
    INTERLEAVED_QKV,
    LAYOUTS,
    UNEVEN,
    HandMade,
    Layout,
    build_handmade,
    build_model,
    build_whole,
    differences,
    handmade_truth,
    local_of,
    poison,
    random_whole,
)
from reference import same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import torchtitan_ext as tte

BY_NAME = {layout.name: layout for layout in LAYOUTS}


def stated(layout: HandMade) -> tte.ShardOrder | None:
    if not layout.must_be_stated:
        return None
    return tte.ShardOrder(tuple((step.axis, step.dim, step.split_factor) for step in layout.steps))


def gather_handmade(rank: int, world_size: int, layout: HandMade) -> list[str]:
    truth = handmade_truth()
    state = build_handmade(layout, truth)
    full = {name: tte.full_tensor(tensor, layout=stated(layout)) for name, tensor in state.items()}
    return differences(full, truth)


@pytest.mark.parametrize("layout", [*HANDMADE, INTERLEAVED_QKV], ids=lambda layout: layout.name)
def test_full_tensor(run_world, layout: HandMade) -> None:
    assert run_world(layout.world_size, gather_handmade, layout) == [[]] * layout.world_size


def refused_interleaved(rank: int, world_size: int) -> str:
    state = build_handmade(INTERLEAVED_QKV, {"wqkv": random_whole((24, 2), torch.float32, 0)})
    with pytest.raises(tte.errors.LayoutError) as caught:
        tte.full_tensor(state["wqkv"])
    return str(caught.value)


def test_full_tensor_refuses_what_it_cannot_tell(run_world) -> None:
    texts = run_world(4, refused_interleaved)
    assert len(set(texts)) == 1
    assert "two ways" in texts[0] and "layouts=" in texts[0]


def distribute_handmade(rank: int, world_size: int, layout: HandMade, src_data_rank: int | None) -> list[str]:
    truth = handmade_truth()
    axes = tuple(f"axis{axis}" for axis in range(len(layout.mesh_shape)))
    mesh = init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=axes)
    state = {}
    for name, whole in truth.items():
        mine = whole if rank == 0 or src_data_rank is None else torch.zeros_like(whole)
        state[name] = tte.distribute_tensor(
            mine, mesh, layout.placements, layout=stated(layout), src_data_rank=src_data_rank
        )
        assert (
            not whole.numel() or local_of(state[name]).untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
        )
    return differences(state, truth, list(layout.steps))


# The two readings of [_StridedShard, Shard] differ: a new tensor is made in the nested one.
MADE_NESTED = [layout for layout in HANDMADE if layout.name != "strided_dtensor"]


@pytest.mark.parametrize("src_data_rank", [0, None])
@pytest.mark.parametrize("layout", [*MADE_NESTED, INTERLEAVED_QKV], ids=lambda layout: layout.name)
def test_distribute_tensor(run_world, layout: HandMade, src_data_rank: int | None) -> None:
    answers = run_world(layout.world_size, distribute_handmade, layout, src_data_rank)
    assert answers == [[]] * layout.world_size


def get_full(rank: int, world_size: int, layout: Layout) -> list[str]:
    model = build_model(layout, UNEVEN)
    truth = build_whole(UNEVEN).state_dict()
    lines = differences(tte.get_full_state_dict(model), truth)
    on_rank0 = tte.get_full_state_dict(model, rank0_only=True, cpu_offload=True)
    return lines + differences(on_rank0, truth if rank == 0 else {})


def set_full(rank: int, world_size: int, layout: Layout, broadcast_from_rank0: bool) -> list[str]:
    model = build_model(layout, UNEVEN, seed=1)
    poison(model.state_dict())
    truth = build_whole(UNEVEN).state_dict()
    has_truth = rank == 0 or not broadcast_from_rank0
    tte.set_full_state_dict(model, truth if has_truth else {}, broadcast_from_rank0=broadcast_from_rank0)
    return differences(model.state_dict(), truth)


ROUND_TRIPS = ["fsdp8", "tp4", "fsdp4_tp2", "fsdp2_tp4", "hsdp2x2", "hsdp2x2_tp2"]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_full_state_dicts_of_a_model(run_world, name: str) -> None:
    layout = BY_NAME[name]
    for function, *args in [(get_full,), (set_full, False), (set_full, True)]:
        answers: list[list[str]] = run_world(layout.world_size, function, layout, *args)
        assert (function.__name__, answers) == (function.__name__, [[]] * layout.world_size)


def full_of_wrapped(rank: int, world_size: int) -> list[str]:
    """Every wrapper that adds a component to names, one in the other."""
    model = build_model(BY_NAME["fsdp2"], UNEVEN)
    model.block = checkpoint_wrapper(model.block)
    compiled = torch.compile(model)
    truth = build_whole(UNEVEN).state_dict()
    lines = differences(tte.get_full_state_dict(compiled), truth)
    poison(model.state_dict())
    tte.set_full_state_dict(compiled, truth)
    lines += differences(tte.get_full_state_dict(compiled), truth)
    return lines + differences(tte.get_full_state_dict(DistributedDataParallel(build_whole(UNEVEN))), truth)


def test_wrapper_prefixes_are_stripped(run_world) -> None:
    assert run_world(2, full_of_wrapped) == [[], []]


def refused_set(rank: int, world_size: int, broadcast_from_rank0: bool) -> tuple[str, list[str]]:
    model = build_model(BY_NAME["fsdp4_tp2"], UNEVEN)
    truth = build_whole(UNEVEN).state_dict()
    wrong = dict(build_whole(UNEVEN, seed=1).state_dict())
    wrong["embed.weight"] = torch.zeros(1, UNEVEN.hidden)
    wrong["head.weigth"] = wrong.pop("head.weight")
    wrong["num_batches"] = torch.tensor(1.5)
    with pytest.raises(tte.errors.StateRefusedError) as caught:
        tte.set_full_state_dict(model, wrong, broadcast_from_rank0=broadcast_from_rank0)
    return str(caught.value), differences(model.state_dict(), truth)


@pytest.mark.parametrize("broadcast_from_rank0", [False, True])
def test_a_full_state_dict_that_does_not_fit_changes_nothing(run_world, broadcast_from_rank0: bool) -> None:
    answers = run_world(8, refused_set, broadcast_from_rank0)
    assert len({text for text, _ in answers}) == 1
    assert all(lines == [] for _, lines in answers)
    for fqn in ["embed.weight", "head.weight", "head.weigth", "num_batches"]:
        assert fqn in answers[0][0]


def round_trip_with_grad(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = nn.Parameter(random_whole((9, 3), torch.float32, 0))
    dtensor = tte.distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
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


def sub_mesh_model(rank: int, world_size: int) -> list[str]:
    """A model with a part on ranks 0 and 1 only: others go through without it."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    whole = random_whole((5, 3), torch.float32, 0)
    part = tte.distribute_tensor(whole, mesh, [Shard(0)])
    model = nn.Linear(3, 5, bias=False)
    model.weight = nn.Parameter(part)
    full = tte.get_full_state_dict(model)
    return differences(full, {"weight": whole} if rank < 2 else {})


def test_ranks_outside_the_mesh(run_world) -> None:
    assert run_world(4, sub_mesh_model) == [[]] * 4
