"""Deltas between random layouts, from no changes to all: over a plan and through files, they give what a full transfer
gives, bit for bit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import SOAK
from gloo_worlds import on_a_gpu
from models import differences, distribute_by_index
from random_layouts import SideOfTransfer, random_tensor
from reference import as_bytes

import torchtitan_ext as tte
from torchtitan_ext.transfer.changed import kept

NUM_TENSORS = 12
SHARES = [0.0, 0.001, 0.02, 0.1, 0.5, 1.0]


def changed(draw: random.Random, whole: torch.Tensor) -> torch.Tensor:
    """A version in which a random share of the elements has other bits."""
    count = round(draw.choice(SHARES) * whole.numel())
    count = max(count, min(1, whole.numel()) * draw.randrange(2))
    items = as_bytes(whole).view(-1, whole.itemsize)
    for element in draw.sample(range(whole.numel()), count):
        if whole.dtype == torch.bool:
            items[element] ^= 1
        else:
            items[element, draw.randrange(whole.itemsize)] ^= draw.randrange(1, 256)
    return items.view(-1).view(whole.dtype).view(whole.shape)


def fill(side: SideOfTransfer, truth: dict[str, torch.Tensor]) -> None:
    for name, tensor in side.tensors.items():
        wanted = distribute_by_index(truth[name], tensor.device_mesh, side.layouts[name])
        tensor._local_tensor.copy_(wanted._local_tensor)


def wrong(side: SideOfTransfer, truth: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{line}: {side.layouts[name]}"
        for name, tensor in side.tensors.items()
        for line in differences({name: tensor}, {name: truth[name]}, list(side.layouts[name].steps))
    ]


def send_random_changes(rank: int, world_size: int, device: str, seeds: list[int], directory: Path) -> list[str]:
    lines = []
    whole_block = kept._BLOCK_ELEMENTS
    for seed in seeds:
        draw = random.Random(seed)
        truth = {f"tensor_{index}": random_tensor(draw) for index in range(NUM_TENSORS)}
        source, target, other = (SideOfTransfer(draw, world_size, truth, device) for _ in range(3))
        keep = draw.choice(["values", "values", "hashes"])
        kept._BLOCK_ELEMENTS = draw.choice([16, whole_block])
        base = tte.delta.Snapshot(source.tensors or None, version=seed, layouts=source.orders, keep=keep)
        plan = tte.transfer.plan_reshard(
            source.tensors or None,
            target.tensors or None,
            source_layouts=source.orders,
            target_layouts=target.orders,
            bucket_bytes=draw.choice([64, 256, 1 << 25]),
        )
        plan.run(version=seed)
        for step in range(2):
            truth = {name: changed(draw, whole) for name, whole in truth.items()}
            fill(source, truth)
            changes = base.changes()
            result = plan.run(changes=changes, verify=draw.random() < 0.5)
            assert result.version == plan.version == changes.version == seed + step + 1
            path = directory / f"{world_size}_{seed}_{step}.safetensors"
            tte.delta.save(changes, path)
            saved = tte.delta.load(path)
            verify = draw.choice(["changed", "all"])
            tte.delta.apply(other.tensors or None, saved, layouts=other.orders, version=seed + step, verify=verify)
            base.advance()
            lines += [f"seed {seed}, sent: {line}" for line in wrong(target, truth)]
            lines += [f"seed {seed}, applied: {line}" for line in wrong(other, truth)]
    kept._BLOCK_ELEMENTS = whole_block
    return lines


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_random_changes(run_world: Any, tmp_path: Path, world_size: int) -> None:
    seeds = list(range(4 * SOAK))
    assert run_world(world_size, send_random_changes, "cpu", seeds, tmp_path) == [[]] * world_size


@pytest.mark.needs_cuda
def test_random_changes_on_a_gpu(run_world: Any, tmp_path: Path) -> None:
    seeds = list(range(1000, 1000 + 2 * SOAK))
    assert run_world(4, on_a_gpu, send_random_changes, "cuda", seeds, tmp_path) == [[]] * 4
