"""One training job, restarted on other numbers of ranks in the middle of an epoch, as if nothing had happened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, ElasticLRScheduler, ElasticPolicy, RngState, Streams, TrainState

GLOBAL_BATCH = 24
NUM_SAMPLES = GLOBAL_BATCH * 18 + 7  # the last 7 of an epoch fill no batch
STEPS_PER_RUN = 2


@dataclass(frozen=True)
class Step:
    """What all ranks together did in a step."""

    samples: tuple[int, ...]
    loss: float
    learning_rate: float


def samples_of_shard(shard: int, num_shards: int, epoch: int) -> list[int]:
    return list(range(NUM_SAMPLES))[shard::num_shards]


def data_of(kind: str) -> Any:
    """Samples are their own indices."""
    if kind == "map-style":
        return range(NUM_SAMPLES)
    return Streams(samples_of_shard, num_shards=int(kind.split()[0]))


class Job:
    """A tiny language model under FSDP2 x TP with everything that a checkpoint holds."""

    def __init__(self, dp: int, tp: int, data: str) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        self.dp, dp_rank = dp, mesh.get_local_rank("dp")
        self.model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 32))
        if tp > 1:
            parallelize_module(self.model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=25)
        self.scheduler = ElasticLRScheduler(cosine, global_batch_size=GLOBAL_BATCH)
        self.loader = ElasticDataLoader(
            data_of(data),
            global_batch_size=GLOBAL_BATCH,
            dp_rank=dp_rank,
            dp_size=dp,
            uneven=True,
            group=mesh.get_group("dp"),
        )
        self.rng = RngState(seed=1, rank=dp_rank, world_size=dp, step=lambda: self.train_state.step)
        self.train_state = TrainState()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
            "rng": self.rng,
            "train_state": self.train_state,
        }

    def load(self, path: Path) -> str:
        state = self.state()
        report = tte.load(state, path, policy=ElasticPolicy())
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return str(report)

    def train(self, num_steps: int | None) -> list[Step]:
        """Trains some steps, or to the end of the epoch."""
        steps: list[Step] = []
        for samples in self.loader:
            tokens = torch.stack([samples % 32, samples * 7 % 32], dim=1)
            # FSDP2 averages gradients over ranks, whose batches may differ in size: the mean is over the global batch.
            loss = nn.functional.cross_entropy(self.model(tokens[:, 0]), tokens[:, 1], reduction="sum") / GLOBAL_BATCH
            (loss * self.dp).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            learning_rate = self.optimizer.param_groups[0]["lr"]
            self.scheduler.step()
            self.train_state.step += 1
            self.train_state.samples_seen = self.loader.samples_seen
            steps.append(self._over_ranks(samples, loss, learning_rate))
            if len(steps) == num_steps:
                break
        return steps

    def _over_ranks(self, samples: torch.Tensor, loss: torch.Tensor, learning_rate: float) -> Step:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (samples.tolist(), loss.item()))
        answers = answers[:: len(answers) // self.dp]  # tensor-parallel neighbours train on the same
        return Step(
            tuple(sorted(sum((part for part, _ in answers), []))), sum(loss for _, loss in answers), learning_rate
        )


@dataclass(frozen=True)
class Run:
    report: str
    steps: list[Step]
    dropped: int
    samples_seen: int


def run(
    rank: int, world_size: int, tp: int, data: str, load: Path | None, save: Path | None, num_steps: int | None
) -> Run:
    job = Job(world_size // tp, tp, data)
    report = job.load(load) if load is not None else ""
    steps = job.train(num_steps)
    if save is not None:
        tte.save(job.state(), save)
    return Run(report, steps, job.loader.dropped, job.loader.samples_seen)


def run_chain(run_world: Any, folder: Path, worlds: list[tuple[int, int]], data: str) -> list[Run]:
    """The job on one world after the other, each from the checkpoint of the one before; the last to the epoch's end."""
    runs: list[Run] = []
    for number, (dp, tp) in enumerate(worlds):
        load = folder / str(number - 1) if number else None
        is_last = number == len(worlds) - 1
        answers = run_world(
            dp * tp, run, tp, data, load, None if is_last else folder / str(number), None if is_last else STEPS_PER_RUN
        )
        assert all(answer == answers[0] for answer in answers)
        runs.append(answers[0])
    return runs


def check_exactly_once(runs: list[Run]) -> list[Step]:
    """Every sample of the epoch was seen once, but for those that are declared to be dropped."""
    steps = [step for one in runs for step in one.steps]
    seen = [sample for step in steps for sample in step.samples]
    assert len(seen) == len(set(seen)) == NUM_SAMPLES - runs[-1].dropped == runs[-1].samples_seen
    return steps


CHAIN = [(2, 1), (4, 1), (8, 1), (4, 2), (2, 2), (3, 2), (1, 2), (3, 1), (1, 1)]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("data", ["map-style", "24 shards"])
def test_a_job_goes_on_as_if_it_had_not_been_restarted(run_world, tmp_path: Path, data: str) -> None:
    (whole,) = run_chain(run_world, tmp_path, [(1, 1)], data)
    runs = run_chain(run_world, tmp_path, CHAIN, data)
    steps = check_exactly_once(runs)
    assert runs[-1].dropped == whole.dropped == 7
    assert len(steps) == len(whole.steps) == 18
    for step, expected in zip(steps, whole.steps, strict=True):
        assert step.samples == expected.samples
        assert step.learning_rate == expected.learning_rate
        assert step.loss == pytest.approx(expected.loss, abs=1e-5)
    # A loss that does not move would show nothing.
    assert abs(whole.steps[0].loss - whole.steps[-1].loss) > 0.1
    assert "saved by 2 ranks (dp 2" in runs[1].report and "loaded by 4 ranks (dp 4" in runs[1].report


def test_world_sizes_that_do_not_divide_the_shards(run_world, tmp_path: Path) -> None:
    (whole,) = run_chain(run_world, tmp_path, [(2, 1)], "8 shards")
    runs = run_chain(run_world, tmp_path, [(2, 1), (8, 1), (3, 1), (5, 1), (1, 1)], "8 shards")
    steps = check_exactly_once(runs)
    # The sets are the same as long as world sizes divide the shards.
    assert [step.samples for step in steps[:4]] == [step.samples for step in whole.steps[:4]]
    assert [step.learning_rate for step in steps] == pytest.approx([step.learning_rate for step in whole.steps])
