"""torchao's float8 all-gather weights and 8-bit optimizer states under FSDP2: stock's files, both ways."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torchtitan_ext as tte
from torchtitan_ext.errors import StateRefusedError
from torchtitan_ext.storage import FileReader, FileWriter

pytest.importorskip("torchao")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

pytestmark = pytest.mark.nightly("clients")

WRITERS = {"stock": (DefaultSavePlanner, FileSystemWriter), "ours": (tte.SavePlanner, FileWriter)}
READERS = {"stock": (DefaultLoadPlanner, FileSystemReader), "ours": (tte.LoadPlanner, FileReader)}
ROWS, COLUMNS = 96, 256  # 8 rows are a multiple of the 256 values of a block, and 4096 values are not


def build(world_size: int, seed: int) -> dict[str, Any]:
    """The state of a model with float8 weights and 8-bit moments after one step; sharded where there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, 16, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = gradient(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments["state"]}


def gradient(param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return torch.randn(param.shape)
    local = torch.randn(param.to_local().shape)
    return DTensor.from_local(local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def plain_parts(state: Any) -> list[Tensor]:
    """The plain tensors that a state consists of, in order."""
    if isinstance(state, dict):
        return [part for value in state.values() for part in plain_parts(value)]
    local = state.to_local() if isinstance(state, DTensor) else state
    if not is_traceable_wrapper_subclass(local):
        return [local.detach()]
    return [part for name in local.__tensor_flatten__()[0] for part in plain_parts(getattr(local, name))]


def full_values(state: Any) -> list[Tensor]:
    """What the tensors stand for, whole."""
    if isinstance(state, dict):
        return [value for member in state.values() for value in full_values(member)]
    return [tte.full_tensor(state)]


def save_all(rank: int, world_size: int, path: Path, source: Path | None) -> list[Tensor]:
    """Saves by both, a new state or that of a checkpoint; returns what was saved."""
    state = build(world_size, seed=rank)
    if source is not None:
        dcp.load(state, storage_reader=FileReader(source / "ours"), planner=tte.LoadPlanner())
    for how, (planner, writer) in WRITERS.items():
        dcp.save(state, storage_writer=writer(path / how), planner=planner())
    return full_values(state)


def load_all(rank: int, world_size: int, path: Path, saved: list[Tensor]) -> list[str]:
    states = {}
    for written in WRITERS:
        for read, (planner, reader) in READERS.items():
            state = build(world_size, seed=10 + rank)
            dcp.load(state, storage_reader=reader(path / written), planner=planner())
            states[f"{written} -> {read}"] = state
    wanted = plain_parts(states["stock -> stock"])
    wrong = [way for way, state in states.items() if not all(map(torch.equal, plain_parts(state), wanted))]
    values = full_values(states["ours -> ours"])
    if len(values) != len(saved) or not all(map(torch.equal, values, saved)):
        wrong.append("not what was saved")
    return wrong


def test_sharded_four_to_two_to_three_ranks(run_world, tmp_path: Path) -> None:
    saved = run_world(4, save_all, tmp_path / "4", None)[0]
    assert run_world(2, load_all, tmp_path / "4", saved) == [[], []]
    again = run_world(2, save_all, tmp_path / "2", tmp_path / "4")[0]
    assert all(map(torch.equal, again, saved))
    assert run_world(3, load_all, tmp_path / "2", saved) == [[], [], []]


def test_unsharded(tmp_path: Path) -> None:
    saved = save_all(0, 1, tmp_path, None)
    keys = [set(FileSystemReader(tmp_path / how).read_metadata().state_dict_metadata) for how in WRITERS]
    assert keys[0] == keys[1] and "optimizer.0.weight.exp_avg" in keys[1]
    assert load_all(0, 1, tmp_path, saved) == []


def moments(rank: int, world_size: int) -> dict[str, Tensor]:
    """As the optimizer makes them of 112 x 160: 56 rows are 35 blocks of 256 values, 28 rows end in one: plain."""
    param = DTensor.from_local(torch.ones(112 // world_size, 160), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    moment = AdamW8bit([nn.Parameter(param)])._new_buffer(param, signed=True)
    moment.to_local().copy_(torch.linspace(-1, 1, 112 // world_size * 160).view(-1, 160) * (rank + 1))
    return {"exp_avg": moment}


def save_moments(rank: int, world_size: int, path: Path) -> Tensor:
    state = moments(rank, world_size)
    tte.save(state, path)
    return tte.full_tensor(state["exp_avg"])


def load_moments(rank: int, world_size: int, path: Path) -> Tensor | str:
    state = moments(rank, world_size)
    state["exp_avg"].to_local().copy_(torch.zeros(112 // world_size, 160))
    try:
        tte.load(state, path)
    except StateRefusedError as error:
        return str(error)
    return tte.full_tensor(state["exp_avg"])


def test_moments_that_are_quantised_on_some_worlds_only(run_world, tmp_path: Path) -> None:
    saved = run_world(2, save_moments, tmp_path / "2")[0]
    for values in run_world(4, load_moments, tmp_path / "2"):
        assert torch.equal(values, saved)
    run_world(4, save_moments, tmp_path / "4")
    for text in run_world(2, load_moments, tmp_path / "4"):
        assert "exp_avg: its OptimState8bit of (56, 160) cannot be cut at (0, 0), (28, 160)" in text
        assert "align with block boundary" in text and "use meshes whose shards end between its blocks" in text


NUM_STEPS = 3


class GatherBytes(DefaultAllGather):
    """gloo has no float8."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)


class Job:
    """A training job whose losses do not depend on the number of ranks: each has the whole batch, and ends of shards
    are ends of quantisation blocks. The second weight is too small for torchao to quantise its moments."""

    def __init__(self, world_size: int, optimizer: type[torch.optim.Optimizer], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(512, 48, bias=False), nn.Linear(48, 48, bias=False))
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(self.model, config=config)
        if world_size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,))).set_custom_all_gather(GatherBytes())
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train(self, first_step: int, num_steps: int) -> list[float]:
        losses = []
        for step in range(first_step, first_step + num_steps):
            generator = torch.Generator().manual_seed(step)
            inputs, wanted = torch.randn(32, 512, generator=generator), torch.randn(32, 48, generator=generator)
            loss = mse_loss(self.model(inputs), wanted)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def of_side(side: str) -> AbstractContextManager[None]:
    return tte.integrations.installed() if side == "ours" else nullcontext()


def first_job(rank: int, world_size: int, optimizer: type[torch.optim.Optimizer], path: Path) -> list[float]:
    with torch.compiler.set_stance("force_eager"):
        job = Job(world_size, optimizer, seed=0)
        losses = job.train(0, NUM_STEPS)
        for side in WRITERS:
            with of_side(side):
                job.save(path / side)
    return losses


def next_jobs(
    rank: int, world_size: int, optimizer: type[torch.optim.Optimizer], first_step: int, old: Path, new: Path
) -> dict[str, list[float]]:
    """Resumes every checkpoint with ``install`` and without, and saves as it has loaded."""
    losses = {}
    with torch.compiler.set_stance("force_eager"):
        for checkpoint in sorted(old.iterdir()):
            for side in READERS:
                way = f"{checkpoint.name} -> {side}"
                job = Job(world_size, optimizer, seed=1)
                with of_side(side):
                    job.load(checkpoint)
                    losses[way] = job.train(first_step, NUM_STEPS)
                    job.save(new / way)
    return losses


@pytest.mark.parametrize("optimizer", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_losses_go_on_from_four_to_two_to_three_ranks(
    run_world, tmp_path: Path, optimizer: type[torch.optim.Optimizer]
) -> None:
    with torch.compiler.set_stance("force_eager"):
        wanted = Job(1, optimizer, seed=0).train(0, 3 * NUM_STEPS)
    assert run_world(4, first_job, optimizer, tmp_path / "4")[0] == pytest.approx(wanted[:3], rel=1e-6)
    second = run_world(2, next_jobs, optimizer, NUM_STEPS, tmp_path / "4", tmp_path / "2")[0]
    third = run_world(3, next_jobs, optimizer, 2 * NUM_STEPS, tmp_path / "2", tmp_path / "3")[0]
    assert (len(second), len(third)) == (4, 8)
    for losses in second.values():
        assert losses == pytest.approx(wanted[3:6], rel=1e-6)
    for losses in third.values():
        assert losses == pytest.approx(wanted[6:], rel=1e-6)
