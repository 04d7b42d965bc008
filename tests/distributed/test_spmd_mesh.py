"""FSDP2 on one mesh with all axes (``DataParallelMeshDims``, pytorch#176334): saved on it, loaded whole and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, poison, random_whole
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch before 2.13 has no DataParallelMeshDims", allow_module_level=True)

TRUTH = {
    "rows": random_whole((9, 3), torch.float32, 0),
    "columns": random_whole((9, 3), torch.float32, 1),
    "whole": random_whole((5,), torch.float32, 2),
}
TP_PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
DATA_AXES: list[dict[str, Any]] = [
    {"shard": "dp"},
    {"shard": "dp", "replicate": "replica"},
    {"shard": ("replica", "dp")},
    {"replicate": ("replica", "dp")},
]


def spread(mesh: DeviceMesh, axes: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = nn.Module()
    for name, whole in TRUTH.items():
        local = distribute_tensor(whole, mesh, [Replicate(), Replicate(), TP_PLACEMENTS[name]])
        model.register_parameter(name, nn.Parameter(local))
    fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**axes))
    return model.state_dict()


def save_and_load(rank: int, world_size: int, folder: Path) -> list[str]:
    lines = []
    shapes = ((2, 2, 1), (1, 2, 2), (2, 1, 2))
    meshes = {sizes: init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "dp", "tp")) for sizes in shapes}
    cases = [(sizes, axes) for sizes in shapes for axes in DATA_AXES]
    for number, (sizes, axes) in enumerate(cases):
        state = spread(meshes[sizes], axes)
        tte.save(state, folder / str(number))
        poison(state)
        tte.load(state, folder / str(number))
        full = {name: tte.full_tensor(tensor) for name, tensor in state.items()}
        lines += [f"{sizes} {axes}: {line}" for line in differences(full, TRUTH)]
        plain = {name: torch.zeros_like(whole) for name, whole in TRUTH.items()}
        tte.load(plain, folder / str(number))
        lines += [f"{sizes} {axes}, loaded whole: {line}" for line in differences(plain, TRUTH)]
    return lines


def test_all_choices_of_data_axes(run_world, tmp_path: Path) -> None:
    assert run_world(4, save_and_load, tmp_path) == [[]] * 4
