"""Random layouts saved and loaded as other random layouts: many tensors of one state, each with a mesh of its own."""

from pathlib import Path

import pytest
import torch
from gloo_worlds import on_a_gpu
from models import differences, poison
from random_layouts import build, random_layouts, random_truth
from tier import SOAK, TIER

import torchtitan_ext as tte

NUM_TENSORS = 60


def save_random(rank: int, world_size: int, device: str, seed: int, path: Path) -> None:
    truth = random_truth(seed, NUM_TENSORS)
    state, orders = build(truth, random_layouts(seed, world_size, truth), device)
    tte.save(state, path, planner=tte.SavePlanner(layouts=orders))


def load_random(rank: int, world_size: int, device: str, seed: int, path: Path) -> list[str]:
    truth = random_truth(seed, NUM_TENSORS)
    layouts = random_layouts(seed + 1000, world_size, truth)
    state, orders = build(truth, layouts, device)
    poison(state)
    tte.load(state, path, planner=tte.LoadPlanner(layouts=orders))
    lines = []
    for name, layout in layouts.items():
        order = orders.get(name)
        full = tte.full_tensor(state[name], layout=order)
        found = differences({name: state[name]}, {name: truth[name]}, list(layout.steps))
        found += differences({name: full}, {name: truth[name]})
        lines += [f"{line}: {tuple(truth[name].shape)} as {layout}" for line in found]
    return lines


@pytest.mark.sampled(0.17)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("source", "target"), [(4, 2), (2, 4)] if TIER == "commit" else [(8, 6), (6, 8)])
def test_random_layouts(run_world, tmp_path: Path, seed: int, source: int, target: int) -> None:
    run_world(source, save_random, "cpu", seed, tmp_path)
    assert run_world(target, load_random, "cpu", seed, tmp_path) == [[]] * target
    truth = random_truth(seed, NUM_TENSORS)
    state = {name: torch.empty_like(whole) for name, whole in truth.items()}
    poison(state)
    tte.load(state, tmp_path)
    assert differences(state, truth) == []


@pytest.mark.needs_cuda
@pytest.mark.parametrize("seed", range(100, 100 + SOAK))
def test_random_layouts_on_a_gpu(run_world, tmp_path: Path, seed: int) -> None:
    run_world(4, on_a_gpu, save_random, "cuda", seed, tmp_path)
    assert run_world(2, on_a_gpu, load_random, "cuda", seed, tmp_path) == [[]] * 2
