"""Trains on 8 gloo processes, stops in the middle of an epoch, and goes on with 16, and with 4, as if never stopped.

python examples/elastic_8_to_16.py
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from llama_job import LlamaJob
from outcome import LOSS_TOLERANCE
from text_batches import read_rows
from worlds import run_world

import torchtitan_ext as tte
from torchtitan_ext.elastic import (
    ElasticDataLoader,
    ElasticLRScheduler,
    Resharded,
    RngState,
    Streams,
    TrainState,
    World,
)

GLOBAL_BATCH = 32
NUM_ROWS = 10 * GLOBAL_BATCH + 5  # of an epoch: ten steps, and five rows that fill no batch
SAVE_STEP = 4
NUM_SHARDS = 16  # a multiple of every number of ranks to come


class ByteCounter:
    """How often each rank saw each byte: a component of the user's own, with a rule of its own.

    Each rank saves its counts. Which rank counted what does not matter: rank 0 of the new world gets the sum.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counts: Counter[int] = Counter()

    def state_dict(self) -> dict[str, Any]:
        return {f"rank_{self.rank}": (dict(self.counts),)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (counts,) = state_dict[f"rank_{self.rank}"]
        self.counts = Counter(counts)

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        total = sum((Counter(counts) for (counts,) in saved.values()), Counter())
        mine = dict(total) if self.rank == 0 else {}
        return Resharded({f"rank_{self.rank}": (mine,)}, f"{total.total():,} bytes counted by {len(saved)} ranks")


class ElasticJob(LlamaJob):
    """`LlamaJob` on data-parallel ranks, with everything that a restart needs."""

    def __init__(self, num_ranks: int, *, seed: int) -> None:
        super().__init__({"dp": num_ranks, "tp": 1}, seed=seed)
        self.rows = read_rows(NUM_ROWS)
        self.loader = ElasticDataLoader(
            Streams(lambda shard, num_shards, epoch: range(NUM_ROWS)[shard::num_shards], num_shards=NUM_SHARDS),
            global_batch_size=GLOBAL_BATCH,
            dp_rank=self.data_rank,
            dp_size=self.data_size,
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=NUM_ROWS // GLOBAL_BATCH + 1)
        self.scheduler = ElasticLRScheduler(cosine, global_batch_size=GLOBAL_BATCH)
        self.rng = RngState(seed=seed, rank=self.data_rank, world_size=self.data_size, step=lambda: self.step)
        self.train_state = TrainState()
        self.bytes = ByteCounter(self.data_rank)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
            "rng": self.rng,
            "train_state": self.train_state,
            "bytes": self.bytes,
        }

    def train_epoch(self, *, last_step: int | None = None) -> tuple[list[float], list[int]]:
        """Trains to the epoch's end or up to a step; returns losses and the rows of all ranks. All ranks call it."""
        losses, rows = [], []
        for indices in self.loader:
            tokens = self.rows[indices]
            loss = self.model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.bytes.counts.update(tokens[:, 1:].flatten().tolist())
            self.step += 1
            self.train_state.step, self.train_state.samples_seen = self.step, self.loader.samples_seen
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / self.data_size)
            seen: list[list[int]] = [[] for _ in range(self.data_size)]
            dist.all_gather_object(seen, indices.tolist())
            rows += sum(seen, [])
            if self.step == last_step:
                break
        return losses, rows


class Run(NamedTuple):
    losses: list[float]
    rows: list[int]
    dropped: int = 0
    report: str = ""


def train_and_save(checkpoint: str) -> Run:
    job = ElasticJob(dist.get_world_size(), seed=0)
    before = job.train_epoch(last_step=SAVE_STEP)
    tte.save(job.state(), checkpoint)
    after = job.train_epoch()
    return Run(before[0] + after[0], before[1] + after[1], job.loader.dropped)


def resume(checkpoint: str) -> Run:
    job = ElasticJob(dist.get_world_size(), seed=1)  # Other weights: what is equal afterwards was loaded.
    state = job.state()
    report = tte.load(state, checkpoint)
    job.restore(state)
    return Run(*job.train_epoch(), job.loader.dropped, str(report))


def run(job: Callable[[str], Run], num_ranks: int, checkpoint: str) -> Run:
    start = time.perf_counter()
    outcome = run_world(job, checkpoint, world_size=num_ranks)
    print(f"{job.__name__} on {num_ranks} ranks: {time.perf_counter() - start:.0f} s", flush=True)
    return outcome


def check(whole: Run, resumed: Run) -> bool:
    """Prints whether a run that went on is the second half of the one that never stopped."""
    num_before = SAVE_STEP * GLOBAL_BATCH
    seen = Counter(whole.rows[:num_before] + resumed.rows)
    once = len(seen) == seen.total() == NUM_ROWS - resumed.dropped
    per_step = zip(_batches(whole.rows[num_before:]), _batches(resumed.rows), strict=True)
    same_batches = all(sorted(left) == sorted(right) for left, right in per_step)
    pairs = zip(whole.losses[SAVE_STEP:], resumed.losses, strict=True)
    difference = max(abs(left - right) for left, right in pairs)
    print(resumed.report)
    print(
        f"  rows seen exactly once: {len(seen)} of {NUM_ROWS}, {resumed.dropped} declared as dropped; "
        f"global batches equal as sets: {same_batches}; largest difference of a loss: {difference:.0e}\n"
    )
    return once and same_batches and difference <= LOSS_TOLERANCE


def _batches(rows: list[int]) -> list[list[int]]:
    return [rows[start : start + GLOBAL_BATCH] for start in range(0, len(rows), GLOBAL_BATCH)]


def main() -> int:
    with tempfile.TemporaryDirectory() as checkpoint:
        whole = run(train_and_save, 8, checkpoint)
        answers = [check(whole, run(resume, num_ranks, checkpoint)) for num_ranks in (16, 4)]
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
