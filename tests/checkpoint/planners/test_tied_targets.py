"""Tied targets: a name that the checkpoint lacks, whose memory is that of a name that is loaded, is filled with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.tables.key_table import TensorEntry
from torchtitan_ext.checkpoint.tables.tied_keys import tied_keys
from torchtitan_ext.elastic import ElasticPolicy, Source
from torchtitan_ext.errors import MissingStateError
from torchtitan_ext.layout.layout import ShardReport

TRUTH = torch.arange(30.0).view(10, 3)


class Tied(nn.Module):
    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 3), nn.Linear(3, 10, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def save_one_name(path: Path) -> None:
    tte.weights.save({"embed.weight": TRUTH}, path, no_dist=True)


def test_tied_weights_are_filled_once_and_named(tmp_path: Path) -> None:
    save_one_name(tmp_path)
    model = Tied()
    tte.load(model.state_dict(), tmp_path, no_dist=True)
    assert torch.equal(model.head.weight, TRUTH)
    report = tte.load(Tied().state_dict(), tmp_path, no_dist=True, policy=ElasticPolicy())
    assert report is not None and report.tied == {"head.weight": "embed.weight"} and not report.missing
    assert "tied: head.weight is embed.weight" in str(report)
    with torch.device("meta"):
        state = Tied().state_dict()
    tte.load(state, tmp_path, no_dist=True)
    assert torch.equal(state["head.weight"], TRUTH)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        lambda weight: weight.clone(),
        lambda weight: weight[:5],
        lambda weight: weight.view(3, 10),
        lambda weight: weight.T,
        lambda weight: weight.view(torch.int32),
    ],
)
def test_what_shares_memory_in_part_stays_missing(tmp_path: Path, other: Any) -> None:
    save_one_name(tmp_path)
    weight = torch.zeros(10, 3)
    with pytest.raises(MissingStateError, match="head.weight"):
        tte.load({"embed.weight": weight, "head.weight": other(weight)}, tmp_path, no_dist=True)
    assert not weight.any()


def test_one_memory_in_two_layouts_is_no_tie() -> None:
    memory = torch.zeros(4)
    whole, part = (
        TensorEntry(ShardReport(global_shape=shape, local_sizes=(4,)), torch.float32, False) for shape in ((4,), (8,))
    )
    values = {"a": memory, "b": memory}
    assert tied_keys(values, {"a": whole, "b": whole}, ["a"]) == {"b": "a"}
    assert tied_keys(values, {"a": whole, "b": part}, ["a"]) == {}


def test_a_tie_to_what_is_not_loaded_is_none(tmp_path: Path) -> None:
    save_one_name(tmp_path)
    source = Source(tmp_path, exclude=["embed.*"])
    with pytest.raises(MissingStateError, match="head.weight"):
        tte.load(Tied().state_dict(), source, no_dist=True)


def on_meshes(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    for placement in (Shard(0), Shard(1), Replicate()):  # 3 columns on 4 ranks: one rank has none
        weight = distribute_tensor(torch.zeros(10, 3), mesh, [placement])
        tte.load({"embed.weight": weight, "head.weight": weight.detach()}, path)
        assert torch.equal(weight.full_tensor(), TRUTH)
    # DTensors around one local tensor: each counts its versions.
    weight = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)])
    head = DTensor.from_local(weight.to_local(), mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
    versions = weight._version, head._version
    tte.load({"embed.weight": weight, "head.weight": head}, path)
    assert weight._version > versions[0] and head._version > versions[1]
    weight = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)])
    # One rank disagrees: there the name has memory of its own.
    other = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)])
    head = other if rank == 0 else weight.detach()
    with pytest.raises(MissingStateError, match="head.weight"):
        tte.load({"embed.weight": weight, "head.weight": head}, path)
    assert not weight.full_tensor().any()


def test_tied_tensors_on_meshes(run_world: Any, tmp_path: Path) -> None:
    save_one_name(tmp_path)
    run_world(4, on_meshes, tmp_path)
