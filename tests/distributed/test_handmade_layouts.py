"""DTensors that no model builder makes: several boxes a rank, three axes on one dim, both readings of one placement."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    HANDMADE,
    INTERLEAVED_QKV,
    HandMade,
    build_handmade,
    differences,
    handmade_truth,
    poison,
)
from tier import TIER

import torchtitan_ext as tte

ALL = [layout for layout in (*HANDMADE, INTERLEAVED_QKV) if TIER != "commit" or layout.world_size <= 4]


def stated_layouts(layout: HandMade) -> dict[str, tte.layout.ShardOrder] | None:
    if not layout.must_be_stated:
        return None
    return {"*": tte.layout.ShardOrder(tuple((step.axis, step.dim, step.split_factor) for step in layout.steps))}


def save_handmade(rank: int, world_size: int, layout: HandMade, path: Path) -> None:
    planner = tte.SavePlanner(layouts=stated_layouts(layout))
    dcp.save({"model": build_handmade(layout, handmade_truth())}, checkpoint_id=path, planner=planner)


def load_handmade(rank: int, world_size: int, layout: HandMade, paths: dict[str, Path]) -> list[str]:
    truth = handmade_truth()
    state = build_handmade(layout, truth)
    lines = []
    for source, path in paths.items():
        poison(state)
        planner = tte.LoadPlanner(layouts=stated_layouts(layout))
        dcp.load({"model": state}, checkpoint_id=path, planner=planner)
        lines += [f"from {source}: {line}" for line in differences(state, truth, list(layout.steps))]
    return lines


@pytest.fixture(scope="module")
def saved(run_world, tmp_path_factory) -> dict[str, Path | BaseException]:
    """The checkpoint of every layout, or the error that its save raised."""
    folder = tmp_path_factory.mktemp("handmade")
    outcomes: dict[str, Path | BaseException] = {}
    for layout in ALL:
        try:
            run_world(layout.world_size, save_handmade, layout, folder / layout.name)
            outcomes[layout.name] = folder / layout.name
        except BaseException as error:  # noqa: B036 (DCP's own error is no Exception)
            if isinstance(error, KeyboardInterrupt):
                raise
            outcomes[layout.name] = error
    return outcomes


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_save(saved: dict[str, Path | BaseException], layout: HandMade) -> None:
    outcome = saved[layout.name]
    if not isinstance(outcome, Path):
        raise outcome


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_load_from_every_other(run_world, saved: dict[str, Path | BaseException], layout: HandMade) -> None:
    paths = {source: outcome for source, outcome in saved.items() if isinstance(outcome, Path)}
    assert paths, "no layout could be saved"
    assert run_world(layout.world_size, load_handmade, layout, paths) == [[]] * layout.world_size


def test_load_in_one_process(saved: dict[str, Path | BaseException]) -> None:
    truth = handmade_truth()
    for source, outcome in saved.items():
        if isinstance(outcome, Path):
            state = {name: torch.empty_like(whole) for name, whole in truth.items()}
            poison(state)
            dcp.load({"model": state}, checkpoint_id=outcome, planner=tte.LoadPlanner(), no_dist=True)
            assert (source, differences(state, truth)) == (source, [])
