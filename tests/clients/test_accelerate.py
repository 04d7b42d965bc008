"""accelerate's own ``Accelerator`` with FSDP2: saved by N ranks, resumed by M, with ``installed()`` and without."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import torchtitan_ext as tte

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import merge_fsdp_weights
from fsdp_on_cpu import fsdp_on_cpu
from safetensors.torch import load_file
from transformers.integrations import tensor_parallel

pytestmark = pytest.mark.nightly("clients")

STEPS_BEFORE, STEPS_AFTER = 3, 3
BATCH_SIZE = 12
HOW = {"ours": tte.integrations.installed, "stock": nullcontext}


class Classifier(nn.Module):
    """Its 9 classes are what stock's planners lose on dp 4 x tp 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 20), nn.Linear(20, 16), nn.Linear(16, 9)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(inputs))))


class Job:
    """The objects of a training script, prepared by accelerate for this mesh."""

    def __init__(self, dp: int, tp: int) -> None:
        self.accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="NO_WRAP", state_dict_type="SHARDED_STATE_DICT"
            ),
            parallelism_config=ParallelismConfig(dp_shard_size=dp, tp_size=tp) if tp > 1 else None,
            # The same batches and the same learning rates for any number of ranks.
            dataloader_config=DataLoaderConfiguration(split_batches=True),
        )
        torch.manual_seed(1)
        model = Classifier()
        if tp > 1:
            head = ColwiseParallel(output_layouts=Replicate())
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head}
            parallelize_module(model, self.accelerator.torch_device_mesh["tp"], plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        data = TensorDataset(torch.randn(8 * BATCH_SIZE, 16), torch.randint(9, (8 * BATCH_SIZE,)))
        # accelerate imports this from transformers, which has it no more, and uses it for parameters without TP only.
        with mock.patch.object(tensor_parallel, "ReplicateParallel", None, create=True):
            self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
                model, optimizer, schedule, DataLoader(data, batch_size=BATCH_SIZE)
            )

    def train(self, num_steps: int, start: int = 0) -> list[float]:
        batches = iter(self.accelerator.skip_first_batches(self.loader, start))
        return [self.step(next(batches)) for _ in range(num_steps)]

    def step(self, batch: Any) -> float:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.model(inputs), classes)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return self.accelerator.reduce(loss.detach(), "mean").item()

    def fingerprint(self) -> Any:
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return tte.fingerprint({"model": model, "optimizer": optimizer["state"]})


def save(rank: int, world_size: int, path: Path, tp: int) -> tuple[Any, list[float]]:
    """Saves with ours and without after some steps, and goes on: what was saved, and the losses after it."""
    with fsdp_on_cpu():
        job = Job(world_size // tp, tp)
        job.train(STEPS_BEFORE)
        for how, context in HOW.items():
            with context():
                job.accelerator.save_state(str(path / how))
        return job.fingerprint(), job.train(STEPS_AFTER, start=STEPS_BEFORE)


def resume(rank: int, world_size: int, path: Path, tp: int, how: str) -> tuple[Any, list[float]]:
    with fsdp_on_cpu():
        job = Job(world_size // tp, tp)
        with HOW[how]():
            job.accelerator.load_state(str(path))
        return job.fingerprint(), job.train(STEPS_AFTER, start=STEPS_BEFORE)


def assert_goes_on(answers: list[tuple[Any, list[float]]], saved: tuple[Any, list[float]]) -> None:
    for fingerprint, losses in answers:
        assert fingerprint == saved[0]
        assert losses == pytest.approx(saved[1], abs=1e-5)


@pytest.fixture(scope="module")
def saved_by_4(run_world: Callable[..., Any], tmp_path_factory: Any) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("fsdp")
    return path, run_world(4, save, path, 1)[0]


@pytest.mark.parametrize("loaded", HOW)
@pytest.mark.parametrize("saved", HOW)
@pytest.mark.parametrize("world_size", [2, 3])
def test_4_ranks_to(
    run_world: Callable[..., Any], saved_by_4: tuple[Path, Any], world_size: int, saved: str, loaded: str
) -> None:
    path, expected = saved_by_4
    assert_goes_on(run_world(world_size, resume, path / saved, 1, loaded), expected)


def test_native_files_are_written_with_ours_only(saved_by_4: tuple[Path, Any]) -> None:
    path, _ = saved_by_4
    indices = {how: list((path / how).glob("*/.tte_index")) for how in HOW}
    assert len(indices["ours"]) == 2 and not indices["stock"]


@pytest.fixture(scope="module")
def saved_by_4_x_2(run_world: Callable[..., Any], tmp_path_factory: Any) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("fsdp_tp")
    return path, run_world(8, save, path, 2)[0]


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (3, 2)])
def test_uneven_4_x_2_to(run_world: Callable[..., Any], saved_by_4_x_2: tuple[Path, Any], dp: int, tp: int) -> None:
    path, expected = saved_by_4_x_2
    assert_goes_on(run_world(dp * tp, resume, path / "ours", tp, "ours"), expected)


def test_stock_saves_9_classes_and_cannot_load_them(
    run_world: Callable[..., Any], saved_by_4_x_2: tuple[Path, Any]
) -> None:
    with pytest.raises(CheckpointException, match="mismatch sizes"):
        run_world(2, resume, saved_by_4_x_2[0] / "stock", 1, "stock")


def test_accelerate_merges_what_was_saved_with_ours(saved_by_4_x_2: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = saved_by_4_x_2
    merge_fsdp_weights(str(path / "ours" / "pytorch_model_fsdp_0"), str(tmp_path))
    merged = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in Classifier().state_dict().items()
    }


def run_by_manager(rank: int, world_size: int, run: Path, tp: int, last: int) -> tuple[list[float], list[int]]:
    """The program of the page, ended after some steps: the losses since the start, and the steps that are kept."""
    page = (Path(__file__).parents[2] / "docs" / "use" / "adoption.md").read_text()
    program = page.split("# accelerate: a run\n")[1].split("```")[0].replace("every=500", "every=2")
    with fsdp_on_cpu():
        job, losses = Job(world_size // tp, tp), []

        def train(batch: Any) -> None:
            if len(losses) == last:
                raise KeyboardInterrupt
            losses.append(job.step(batch))

        names = {name: getattr(job, name) for name in ("accelerator", "model", "optimizer", "schedule", "loader")}
        try:
            exec(program, {"tte": tte, "run": run, "train": train, **names})
        except KeyboardInterrupt:
            pass
        return losses, tte.CheckpointManager(run, model=job.model).steps()


def test_a_run_goes_on_by_a_manager(run_world: Callable[..., Any], tmp_path: Path) -> None:
    whole, kept = run_world(4, run_by_manager, tmp_path / "whole", 2, -1)[0]
    assert len(whole) == 8 and kept == [4, 6, 8]
    begun, kept = run_world(4, run_by_manager, tmp_path / "run", 2, 5)[0]
    assert begun == pytest.approx(whole[:5], abs=1e-5) and kept == [2, 4]
    ranks = run_world(3, run_by_manager, tmp_path / "run", 1, -1)
    assert all(rest == pytest.approx(whole[4:], abs=1e-5) for rest, _ in ranks)
    assert ranks[0][1] == [4, 6, 8], "the coordinator removes old steps"
