"""What is known of the ranks that save or load."""

from typing import Any

import torch
from simulated_ranks import load, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.tables.component import World, saved_world

DP4 = ((4,), ("dp",))


def world_of(meshes: list[tuple[tuple[int, ...], tuple[str, ...] | None]], held: list[str]) -> World:
    return World(len(held), _core.axes_of(meshes, [sorted(set(held)).index(keys) for keys in held]))


def test_axes_of_all_meshes_by_name() -> None:
    world = world_of([((2,), ("tp",)), ((4, 2), ("dp", "tp")), ((8,), None)], ["all"] * 8)
    assert str(world) == "8 ranks (dp 4 x tp 2)"


def test_stages_of_a_pipeline_are_told_from_the_ranks() -> None:
    assert str(world_of([DP4], ["first"] * 4 + ["last"] * 4)) == "8 ranks (pp 2 x dp 4)"
    assert str(world_of([((4, 1), ("dp", "tp"))], list("aabbccdd") * 2)) == "16 ranks (pp 4 x dp 4 x tp 1)"
    assert str(world_of([((1,), ("dp",))], ["first", "last"])) == "2 ranks (pp 2 x dp 1)"


def test_ranks_that_hold_different_keys_are_not_all_stages() -> None:
    assert str(world_of([DP4], ["all"] * 3 + ["one more"])) == "4 ranks (dp 4)"
    assert str(world_of([((2,), ("ep",)), DP4], ["a", "a", "b", "b"])) == "4 ranks (ep 2 x dp 4)"
    assert str(world_of([((2, 4), ("pp", "dp"))], ["a"] * 4 + ["b"] * 4)) == "8 ranks (pp 2 x dp 4)"
    assert str(world_of([], ["a", "b"])) == "2 ranks"


def stage_state(rank: int) -> dict[str, Any]:
    """What a rank of a pipeline of two stages on two ranks each holds: a parameter of its stage."""
    stage = rank // 2
    mesh = DeviceMesh("cpu", [2 * stage, 2 * stage + 1], mesh_dim_names=("dp",), _init_backend=False, _rank=rank)
    return {f"layers.{stage}": DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)}


def test_a_pipeline_is_in_the_metadata_and_in_the_report() -> None:
    saved = save([stage_state(rank) for rank in range(4)])
    assert str(saved_world(saved.metadata)) == "4 ranks (pp 2 x dp 2)"
    states = [stage_state(rank) for rank in range(4)]
    planners = load(saved, states, lambda: tte.LoadPlanner(policy=ElasticPolicy())).planners
    assert "saved by 4 ranks (pp 2 x dp 2), loaded by 4 ranks (pp 2 x dp 2)" in str(planners[0].report)
