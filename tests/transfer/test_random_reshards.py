"""Random layouts become other random layouts in the memory of the ranks: meshes of all ranks, of some, overlapping or
apart, in any order of ranks, several boxes, empty shards, every dtype by bits."""

import random
from typing import Any

import pytest
from gloo_worlds import on_a_gpu
from models import differences, poison
from random_layouts import SideOfTransfer, random_tensor
from tier import SOAK, TIER

import torchtitan_ext as tte

NUM_TENSORS = 30


def reshard_random(rank: int, world_size: int, device: str, seeds: list[int]) -> list[str]:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        truth = {f"tensor_{index}": random_tensor(draw) for index in range(NUM_TENSORS)}
        source, target = (SideOfTransfer(draw, world_size, truth, device) for _ in range(2))
        poison(target.tensors)
        plan = tte.transfer.plan_reshard(
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


@pytest.mark.parametrize("world_size", [2, 4] if TIER == "commit" else [2, 5, 8])
def test_random_layouts(run_world: Any, world_size: int) -> None:
    seeds = list(range(4 * SOAK))
    assert run_world(world_size, reshard_random, "cpu", seeds) == [[]] * world_size


@pytest.mark.needs_cuda
def test_random_layouts_on_a_gpu(run_world: Any) -> None:
    seeds = list(range(1000, 1000 + 2 * SOAK))
    assert run_world(4, on_a_gpu, reshard_random, "cuda", seeds) == [[]] * 4
