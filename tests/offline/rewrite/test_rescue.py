"""Checkpoints that stock has described wrongly: rescued bit for bit where all bytes are there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warm_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext.errors import DamagedCheckpointError, ReshardError, WrongValueError
from torchtitan_ext.layout.layout import local_shard
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.misdescribed import RescuedFiles
from torchtitan_ext.offline.selection import Selection

RunWorld = Callable[..., list[Any]]

LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((3,), [Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
]


def differing_keys(rank: int, world_size: int, path: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Loads the tensors of a checkpoint onto the layouts of this world's size; the keys that are not as expected."""
    wrong = []
    for number, (shape, placements) in enumerate(LAYOUTS):
        if torch.Size(shape).numel() != world_size:
            continue
        mesh = dist.init_device_mesh("cpu", shape)
        state = {}
        for key, value in expected.items():
            fitting = [one if getattr(one, "dim", 0) < value.dim() else Replicate() for one in placements]
            state[key] = tte.full.distribute_tensor(torch.zeros_like(value), mesh, fitting)
        tte.load(state, path)
        for key, value in expected.items():
            found = tte.full.full_tensor(state[key])
            if found.dtype != value.dtype or not torch.equal(_bytes(found), _bytes(value)):
                wrong.append(f"{key} on layout {number}")
    return wrong


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def save_by_stock(rank: int, world_size: int, path: Path, rows: int) -> dict[str, torch.Tensor]:
    """FSDP2 over tensor parallelism of two ranks, with the moments of AdamW; returns the whole tensors."""
    torch.manual_seed(1)
    mesh = dist.init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.sin(parameter.detach())  # DTensor itself multiplies no such matrices
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=path)
    tensors = {f"{top}.{key}": value for top in ("model", "optim") for key, value in state[top].items()}  # type: ignore[attr-defined]
    return {key: tte.full.full_tensor(value) for key, value in tensors.items() if isinstance(value, DTensor)}


@pytest.fixture
def saved(run_world: RunWorld, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path / "saved"
    (expected, *_) = run_world(6, save_by_stock, path, 7)
    return path, expected


def stock_cannot_load(rank: int, world_size: int, path: Path, key: str, shape: tuple[int, ...]) -> bool:
    try:
        dcp.load({key: torch.zeros(shape)}, checkpoint_id=path)
    except BaseException:  # CheckpointException is none of Exception
        return True
    return False


@pytest.mark.parametrize(("world_size", "rows"), [(6, 7), (8, 9), (8, 17)])
def test_rescued_bit_for_bit(run_world: RunWorld, tmp_path: Path, world_size: int, rows: int) -> None:
    (expected, *_) = run_world(world_size, save_by_stock, tmp_path / "saved", rows)
    assert run_world(1, stock_cannot_load, tmp_path / "saved", "model.0.weight", (rows, 3)) == [True]
    source = RescuedFiles(tmp_path / "saved", {"dp": world_size // 2, "tp": 2})
    first = {f"model.0.{name}" for name in ("weight", "bias")}
    moments = {f"optim.state.0.{name}.{part}" for name in ("weight", "bias") for part in ("exp_avg", "exp_avg_sq")}
    assert set(source.rescued) == first | moments
    convert(source, tmp_path / "new", to="dcp", num_processes=1, max_bytes=64)
    for size in (3, 4):
        assert run_world(size, differing_keys, tmp_path / "new", expected) == [[]] * size
    assert run_world(1, stock_cannot_load, tmp_path / "new", "model.0.weight", (rows, 3)) == [False]


def test_the_command(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, expected = saved
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    command = ["-m", "torchtitan_ext", "rescue", path, tmp_path / "new", "--mesh", "dp=3,tp=2"]
    done = warm_processes.run([*command, "--json"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "model.0.weight" in json.loads(done.stdout)["rescued"]
    tte.load(found := {"model.0.weight": torch.zeros(7, 3)}, tmp_path / "new")
    assert torch.equal(found["model.0.weight"], expected["model.0.weight"])
    again = warm_processes.run(command, capture_output=True)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    in_place = warm_processes.run([*command[:3], path, path, *command[5:]], capture_output=True)
    assert (in_place.returncode, "is there already" in in_place.stderr) == (2, True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 3}, {"dp": 6}, {"dp_replicate": 3, "tp": 2}, {"dp": 2, "tp": 2}])
def test_a_mesh_that_did_not_save(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, mesh: dict[str, int]
) -> None:
    source = RescuedFiles(saved[0], mesh)
    with pytest.raises(ReshardError, match="no way to cut it on .* explains what its ranks wrote; give the mesh"):
        convert(source, tmp_path / "new", to="dcp", num_processes=1)
    assert not (tmp_path / "new").exists()
    convert(source, tmp_path / "new", to="dcp", num_processes=1, selection=Selection(("model.1.*", "step")))


def test_a_rule_that_says_otherwise(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source = RescuedFiles(saved[0], {"dp": 3, "tp": 2}, {"0.weight": {"tp": 1}})
    with pytest.raises(ReshardError, match=r"model.0.weight: no way to cut it on dp=3,tp=2"):
        convert(source, tmp_path / "new", to="dcp", num_processes=1)


def test_nothing_to_rescue(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(6, save_by_stock, tmp_path / "saved", 6)
    with pytest.raises(WrongValueError, match="describes all tensors rightly"):
        RescuedFiles(tmp_path / "saved", {"dp": 3, "tp": 2})


def test_a_file_of_a_rank_that_is_missing(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    os.remove(saved[0] / "__3_0.distcp")
    with pytest.raises((DamagedCheckpointError, OSError), match="__3_0.distcp"):
        RescuedFiles(saved[0], {"dp": 3, "tp": 2})


def save_parts_that_stock_takes_for_one(rank: int, world_size: int, path: Path, busy: int) -> int:
    """Three axes cut 5 rows. For stock ranks 3, 6 and 7 hold no row, at the end, and the one that writes least else
    writes it; rank 3 has row 4 in truth. The rank ``busy`` writes another tensor too."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2))
    shard = local_shard((5,), (2, 2, 2), ((2, 0, 1), (1, 0, 1), (0, 0, 1)), mesh.get_coordinate() or ())
    local = torch.arange(5.0)[shard.chunks[0].offsets[0] :][: shard.sizes[0]] if shard.chunks else torch.empty(0)
    placements = [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]
    more = {"more": torch.ones(9)} if rank == busy else {}
    w = DTensor.from_local(local, mesh, placements, shape=(5,), stride=(1,))
    dcp.save({**more, "w": w, "n": 1}, checkpoint_id=path)
    return len(local)


def test_what_a_save_has_dropped_is_named(run_world: RunWorld, tmp_path: Path) -> None:
    mesh = {"one": 2, "other": 2, "tp": 2}
    held = run_world(8, save_parts_that_stock_takes_for_one, tmp_path / "whole", 7)
    assert held == [1, 1, 1, 1, 1, 0, 0, 0]
    convert(RescuedFiles(tmp_path / "whole", mesh), tmp_path / "new", to="dcp", num_processes=1)
    tte.load(found := {"w": torch.zeros(5)}, tmp_path / "new")
    assert torch.equal(found["w"], torch.arange(5.0))

    run_world(8, save_parts_that_stock_takes_for_one, tmp_path / "lost", 3)
    source = RescuedFiles(tmp_path / "lost", mesh)
    with pytest.raises(ReshardError, match=r"w: elements \[1\] at \[4\] of rank 3 are in no file: stock took them"):
        convert(source, tmp_path / "never", to="dcp", num_processes=1)
    assert not (tmp_path / "never").exists()
    assert (
        convert(source, tmp_path / "rest", to="dcp", num_processes=1, selection=Selection(("n", "more"))).num_keys == 2
    )
