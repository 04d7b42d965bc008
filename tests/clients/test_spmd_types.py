"""FSDP2 over parameters that ``spmd_types`` annotates (pytorch#181519): plain shards that it turns into DTensors."""

from pathlib import Path

import pytest
import torch
from models import differences, random_whole
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

pytestmark = pytest.mark.nightly("clients")

spmd = pytest.importorskip("spmd_types")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
    pytest.skip("FSDP2 reads the annotations of spmd_types since torch 2.14", allow_module_level=True)


def save_annotated(rank: int, world_size: int, num_rows: int, path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    truth = {"rows": random_whole((num_rows, 3), torch.float32, 0), "whole": random_whole((5,), torch.float32, 1)}
    model = nn.Module()
    model.rows = nn.Parameter(truth["rows"].chunk(2)[mesh.get_local_rank("tp")].clone())
    model.whole = nn.Parameter(truth["whole"].clone())
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(model.rows, {dp: spmd.R, tp: spmd.S(0)})
        spmd.assert_type(model.whole, {dp: spmd.R, tp: spmd.R})
        fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    tte.save(model.state_dict(), path)
    loaded = {name: torch.zeros_like(whole) for name, whole in truth.items()}
    tte.load(loaded, path)
    return differences(loaded, truth)


def test_annotated_parameters_load_whole(run_world, tmp_path: Path) -> None:
    assert run_world(4, save_annotated, 16, tmp_path) == [[]] * 4


def test_annotations_that_cannot_be_true_are_refused(run_world, tmp_path: Path) -> None:
    """Annotations know no uneven dim: FSDP2 then gives each tensor-parallel rank a global shape of its own."""
    with pytest.raises(
        tte.errors.StateRefusedError, match=r"rows: rank 0 has shape \(10, 3\), rank 1 has shape \(8, 3\)"
    ):
        run_world(4, save_annotated, 9, tmp_path)
