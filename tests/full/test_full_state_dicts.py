"""Full state dicts of models, on the layouts where stock is wrong or refuses."""

import pytest
import torch
import torch.distributed as dist
from models import (
    BY_NAME,
    UNEVEN,
    Layout,
    build_model,
    build_whole,
    differences,
    poison,
    random_whole,
)
from tier import of_at_most_four
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import torchtitan_ext as tte


def get_full(rank: int, world_size: int, layout: Layout) -> list[str]:
    model = build_model(layout, UNEVEN)
    truth = build_whole(UNEVEN).state_dict()
    lines = differences(tte.full.get_full_state_dict(model), truth)
    on_rank0 = tte.full.get_full_state_dict(model, rank0_only=True, cpu_offload=True)
    return lines + differences(on_rank0, truth if rank == 0 else {})


def set_full(rank: int, world_size: int, layout: Layout, broadcast_from_rank0: bool) -> list[str]:
    model = build_model(layout, UNEVEN, seed=1)
    poison(model.state_dict())
    truth = build_whole(UNEVEN).state_dict()
    has_truth = rank == 0 or not broadcast_from_rank0
    tte.full.set_full_state_dict(model, truth if has_truth else {}, broadcast_from_rank0=broadcast_from_rank0)
    return differences(model.state_dict(), truth)


ROUND_TRIPS = ["fsdp8", "tp4", "fsdp4_tp2", "fsdp2_tp4", "hsdp2x2", "hsdp2x2_tp2"]


@pytest.mark.parametrize("name", of_at_most_four(ROUND_TRIPS, lambda name: BY_NAME[name].world_size))
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
    lines = differences(tte.full.get_full_state_dict(compiled), truth)
    poison(model.state_dict())
    tte.full.set_full_state_dict(compiled, truth)
    lines += differences(tte.full.get_full_state_dict(compiled), truth)
    return lines + differences(tte.full.get_full_state_dict(DistributedDataParallel(build_whole(UNEVEN))), truth)


def test_wrapper_prefixes_are_stripped(run_world) -> None:
    assert run_world(2, full_of_wrapped) == [[], []]


class Tied(nn.Module):
    """Tied weights, a plain buffer, a frozen parameter, one that is not offered, all on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.rest = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 3)
        self.head.weight = self.embed.weight
        self.rest.bias.requires_grad_(False)
        self.extra = nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", torch.zeros(4))


def set_on_meta(rank: int, world_size: int, broadcast_from_rank0: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    truth = {name: torch.randn_like(value) for name, value in Tied().state_dict().items() if name != "extra"}
    truth["head.weight"] = truth["embed.weight"]
    with torch.device("meta"):
        model = Tied()
    fully_shard(model.rest, mesh=mesh)
    given = truth if rank == 0 or not broadcast_from_rank0 else {}
    tte.full.set_full_state_dict(model, given, broadcast_from_rank0=broadcast_from_rank0, strict=False)
    assert model.head.weight is model.embed.weight and model.extra.is_meta
    assert isinstance(model.rest.weight, DTensor) and isinstance(model.rest.weight, nn.Parameter)
    assert [param.requires_grad for param in (model.rest.weight, model.rest.bias)] == [True, False]
    lines = differences({name: tte.full_tensor(model.state_dict()[name]) for name in truth}, truth)
    model.rest(torch.ones(1, 3)).sum().backward()  # FSDP2 knows the new parameters
    return lines + ([] if model.rest.weight.grad is not None else ["no gradient"])


@pytest.mark.parametrize("broadcast_from_rank0", [False, True])
def test_a_model_on_meta_gets_memory(run_world, broadcast_from_rank0: bool) -> None:
    assert run_world(2, set_on_meta, broadcast_from_rank0) == [[]] * 2


def refused_values(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.zeros(2, 2)
    given = {"weight": tte.full.distribute_tensor(whole, mesh, [Shard(0)]), "bias": 3 if rank else whole[0]}
    with pytest.raises(tte.errors.StateRefusedError) as caught:
        tte.full.set_full_state_dict(nn.Linear(2, 2), given)
    return str(caught.value)


def test_values_that_are_no_full_tensors(run_world) -> None:
    first, second = run_world(2, refused_values)
    assert first == second
    assert "weight: is a DTensor in the full state dict, expected its full tensor" in first
    assert "bias: is a int in the full state dict, expected its full tensor" in first


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="^get_full_state_dict: got model=a dict, expected a module$"):
        tte.full.get_full_state_dict({})
    with pytest.raises(TypeError, match="^get_full_state_dict: got model=the class Linear, expected a module$"):
        tte.full.get_full_state_dict(nn.Linear)
    with pytest.raises(TypeError, match="^set_full_state_dict: got model=a dict, expected a module$"):
        tte.full.set_full_state_dict({}, nn.Linear(1, 1))
    with pytest.raises(TypeError, match="^set_full_state_dict: got full_state_dict=a Linear, expected a dict of full"):
        tte.full.set_full_state_dict(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(TypeError, match="^get_full_state_dict: got layouts=a list, expected a dict of ShardOrder"):
        tte.full.get_full_state_dict(nn.Linear(1, 1), layouts=[])


def refused_set(rank: int, world_size: int, broadcast_from_rank0: bool) -> tuple[str, list[str]]:
    model = build_model(BY_NAME["fsdp4_tp2"], UNEVEN)
    truth = build_whole(UNEVEN).state_dict()
    wrong = dict(build_whole(UNEVEN, seed=1).state_dict())
    wrong["embed.weight"] = torch.zeros(1, UNEVEN.hidden)
    wrong["head.weigth"] = wrong.pop("head.weight")
    wrong["num_batches"] = torch.tensor(1.5)
    with pytest.raises(tte.errors.StateRefusedError) as caught:
        tte.full.set_full_state_dict(model, wrong, broadcast_from_rank0=broadcast_from_rank0)
    return str(caught.value), differences(model.state_dict(), truth)


@pytest.mark.parametrize("broadcast_from_rank0", [False, True])
def test_a_full_state_dict_that_does_not_fit_changes_nothing(run_world, broadcast_from_rank0: bool) -> None:
    answers = run_world(8, refused_set, broadcast_from_rank0)
    assert len({text for text, _ in answers}) == 1
    assert all(lines == [] for _, lines in answers)
    for fqn in ["embed.weight", "head.weight", "head.weigth", "num_batches"]:
        assert fqn in answers[0][0]


def sub_mesh_model(rank: int, world_size: int) -> list[str]:
    """A model with a part on ranks 0 and 1 only: others go through without it."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    whole = random_whole((5, 3), torch.float32, 0)
    part = tte.full.distribute_tensor(whole, mesh, [Shard(0)])
    model = nn.Linear(3, 5, bias=False)
    model.weight = nn.Parameter(part)
    full = tte.full.get_full_state_dict(model)
    return differences(full, {"weight": whole} if rank < 2 else {})


def test_ranks_outside_the_mesh(run_world) -> None:
    assert run_world(4, sub_mesh_model) == [[]] * 4
