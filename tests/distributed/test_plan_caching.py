"""`SavePlanner(enable_plan_caching=True)` is accepted, as in stock, and changes nothing: every save is planned anew."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    UNEVEN,
    build_model,
    build_optimizer,
    build_whole,
    differences,
    leaves,
    take_steps,
    training_state,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

import torchtitan_ext as tte
from torchtitan_ext.storage import FileWriter

CACHES = [name for name in vars(SavePlanner) if name.startswith("_cached_")]


def train_and_save(rank: int, world_size: int, folder: Path, kind: type[Any]) -> None:
    model = build_model(BY_NAME["fsdp2_tp2"], UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    for step in range(3):
        take_steps(model, optimizer, num_steps=1)
        state = {**training_state(model, optimizer), "step": step}
        if rank == 1 and step == 1:
            state["extra"] = torch.arange(3)
        planner = tte.SavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=kind(folder / str(step)), planner=planner)
    assert not any(getattr(SavePlanner, name) for name in CACHES)


@pytest.mark.parametrize("kind", [FileWriter, FileSystemWriter])
def test_every_step_has_its_own_values(run_world, tmp_path: Path, kind: type[Any]) -> None:
    run_world(4, train_and_save, tmp_path, kind)
    model = build_whole(UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    for step in range(3):
        take_steps(model, optimizer, num_steps=1)
        truth = {**training_state(model, optimizer), "step": step}
        state = build_whole(UNEVEN, seed=1)
        fresh = {**training_state(state, build_optimizer(state, lr=0.5)), "step": -1}
        if step == 1:
            fresh["extra"], truth["extra"] = torch.zeros(3, dtype=torch.int64), torch.arange(3)
        tte.load(fresh, tmp_path / str(step))
        assert differences(fresh, dict(leaves(truth))) == []
