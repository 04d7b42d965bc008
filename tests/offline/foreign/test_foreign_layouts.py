"""Six kinds of foreign checkpoints, each onto three layouts, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from foreign_checkpoints import Trained, write_torch_dist, write_universal, write_zero_2, write_zero_3
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext.offline.compare.diff import DiffReport, diff
from torchtitan_ext.offline.mapped_files import MappedFiles
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source

RunWorld = Callable[..., list[Any]]
Tensors = dict[str, torch.Tensor]

LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((3,), [Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
]


def differing_keys(rank: int, world_size: int, path: Path, expected: Tensors) -> list[str]:
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


def check_on_all_layouts(run_world: RunWorld, source: Path, target: Path, expected: Tensors) -> None:
    """Converts a checkpoint to DCP in parts of 64 bytes, and loads it."""
    convert(open_source(source), target, to="dcp", num_processes=1, max_bytes=64)
    for world_size in (3, 4):
        assert run_world(world_size, differing_keys, target, expected) == [[]] * world_size


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(run_world: RunWorld, tmp_path: Path, stage: int, num_ranks: int) -> None:
    state = Trained()
    write_zero_2(tmp_path / "saved" / "step2", state, num_ranks, stage=stage)
    (tmp_path / "saved" / "latest").write_text("step2")
    check_on_all_layouts(run_world, tmp_path / "saved", tmp_path / "new", state.expected())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_zero_3(run_world: RunWorld, tmp_path: Path, num_ranks: int) -> None:
    state = Trained()
    source = write_zero_3(tmp_path / "saved", state, num_ranks)
    check_on_all_layouts(run_world, source, tmp_path / "new", state.expected())


@pytest.mark.parametrize("is_flat", [False, True])
def test_universal(run_world: RunWorld, tmp_path: Path, is_flat: bool) -> None:
    state = Trained()
    source = write_universal(tmp_path / "saved", state, flat=is_flat)
    check_on_all_layouts(run_world, source, tmp_path / "new", state.expected(step=not is_flat))


def full_tensors() -> Tensors:
    """In rows that neither two nor three ranks share evenly."""
    generator = torch.Generator().manual_seed(3)
    return {
        "decoder.layers.w": torch.randn(3, 5, 4, generator=generator).bfloat16(),
        "decoder.norm": torch.randn(7, generator=generator),
        "optimizer.state.exp_avg.decoder.norm": torch.randn(7, generator=generator),
    }


def save_torch_dist(rank: int, world_size: int, path: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    write_torch_dist(path, {k: tte.full.distribute_tensor(v, mesh, [Shard(0)]) for k, v in full_tensors().items()})


def test_torch_dist(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, save_torch_dist, tmp_path / "saved")
    check_on_all_layouts(run_world, tmp_path / "saved", tmp_path / "new", full_tensors())
    values = open_source(tmp_path / "new")
    assert (values.read_value("iteration"), values.read_value("args.lr")) == (7, 0.1)
    assert values.read_value("rng_state/shard_1_2") == [{"seed": 1}]


def save_each_rank(rank: int, world_size: int, path: Path) -> Tensors:
    """FSDP2 over tensor parallelism, rows that stock describes wrongly; returns the whole tensors."""
    torch.manual_seed(7)
    mesh = dist.init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    expected = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = {"model": model.state_dict(), "ema": {"mean": torch.arange(5.0)}, "step": 3}
    torch.save(state, path / f"checkpoint.{rank + 10}.pt")  # the names need not begin at 0
    return expected | {"ema.mean": torch.arange(5.0)}


def test_a_file_per_rank(run_world: RunWorld, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (expected, *_) = run_world(6, save_each_rank, tmp_path / "saved")
    check_on_all_layouts(run_world, tmp_path / "saved", tmp_path / "new", expected)
    assert open_source(tmp_path / "new").read_value("step") == 3


def save_components(rank: int, world_size: int, path: Path) -> Tensors:
    torch.manual_seed(9)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    full = {
        "model.w": torch.randn(5, 4),
        "optimizer.w.exp_avg": torch.randn(5, 4),
        "ema.w": torch.randn(5, 4).bfloat16(),
    }
    parts = {key: tte.full.distribute_tensor(value, mesh, [Shard(0)]) for key, value in full.items()}
    optimizer = {"w": {"exp_avg": parts["optimizer.w.exp_avg"]}, "lr": 0.5}
    state = {"model": {"w": parts["model.w"]}, "optimizer": optimizer, "ema": {"w": parts["ema.w"]}, "step": 3}
    dcp.save(state, checkpoint_id=path)
    return full


def test_components_of_stock(run_world: RunWorld, tmp_path: Path) -> None:
    (full, *_) = run_world(2, save_components, tmp_path / "saved")
    check_on_all_layouts(run_world, tmp_path / "saved", tmp_path / "new", full)


def test_other_commands_and_formats(tmp_path: Path) -> None:
    """The same source of boxes for ``diff``, ``reshard``, safetensors, a transform and a cast."""
    state = Trained()
    source = write_zero_2(tmp_path / "saved", state, 3)
    opened = open_source(source)
    assert diff(opened, open_source(write_zero_3(tmp_path / "dealt", state, 2))) == DiffReport(
        (), len(opened.state.entries)
    )
    reshard(opened, tmp_path / "resharded", mesh={"dp_shard": 4}, num_processes=1)
    assert diff(opened, open_source(tmp_path / "resharded")).differences == ()
    rename = tte.transforms.Transform([tte.transforms.Rule("model.**", "**")], drop=["optimizer.**", *opened.values])
    mapped = MappedFiles(opened, rename)
    convert(mapped, tmp_path / "weights", to="safetensors", dtype="bfloat16", num_processes=1)
    tte.load(found := {"cube": torch.zeros(2, 3, 4, dtype=torch.bfloat16)}, tmp_path / "weights")
    assert torch.equal(found["cube"], state.values["cube"]["fp32"].bfloat16())


class Model(nn.Module):
    """The model of ``Trained``."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head, self.a = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.Linear(5, 3, bias=False)
        self.head.weight = self.emb.weight
        self.cube, self.b, self.one = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 3, 4), (3,), (1,)))
        self.f, self.norm = nn.Linear(3, 5), nn.Module()
        self.f.bias = nn.Parameter(torch.zeros(1))
        self.f.requires_grad_(False)
        self.norm.register_buffer("mean", torch.zeros(4))
        self.norm.register_buffer("count", torch.tensor(0))


def go_on(rank: int, world_size: int, path: Path) -> tuple[Tensors, list[float]]:
    """Loads into FSDP2 and torch's AdamW; what of each parameter these have then, and the options of the groups."""
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(
        [{"params": [model.emb.weight, model.a.weight, model.cube]}, {"params": [model.b, model.one]}]
    )
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "global_steps": 0,
    }
    tte.load(state, path, planner=tte.LoadPlanner(cast="allow"))  # frozen parameters are bfloat16 in the files
    set_model_state_dict(model, state["model"])  # type: ignore[arg-type]
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)  # type: ignore[arg-type]
    found = {"cube": model.cube, "exp_avg": optimizer.state[model.cube]["exp_avg"], "frozen": model.f.weight}
    whole = {key: tte.full.full_tensor(value).detach() for key, value in found.items()}
    whole |= {"step": optimizer.state[model.b]["step"], "count": model.norm.count}  # type: ignore[dict-item]
    return whole, [group[key] for group in optimizer.param_groups for key in ("lr", "weight_decay")]


@pytest.mark.parametrize("step", [2, torch.tensor(2.0)])
def test_a_trainer_of_torch_goes_on(run_world: RunWorld, tmp_path: Path, step: object) -> None:
    """DeepSpeed's own Adam counts in numbers, torch's in tensors."""
    state = Trained(step=step)
    convert(open_source(write_zero_2(tmp_path / "saved", state, 3)), tmp_path / "new", to="dcp", num_processes=1)
    for whole, groups in run_world(2, go_on, tmp_path / "new"):
        assert torch.equal(whole["cube"], state.values["cube"]["fp32"])
        assert torch.equal(whole["exp_avg"], state.values["cube"]["exp_avg"])
        assert torch.equal(whole["frozen"], state.frozen_values["f.weight"].float())
        assert (float(whole["step"]), int(whole["count"])) == (2.0, 9)
        assert groups == [0.01, 0.0, 0.01, 0.1]
