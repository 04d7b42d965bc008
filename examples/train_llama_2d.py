"""Trains a tiny Llama on 4 gloo processes as FSDP2 2 x TP 2, saves it, and resumes on other meshes, bit for bit.

Each load proves itself: the fingerprints of what it loaded are those that the save stored.

Before each resume stock PyTorch is asked to load the same checkpoint into the same model; its answer stands beside
ours.

python examples/train_llama_2d.py
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable

import torch.distributed.checkpoint as dcp
from llama_job import LlamaJob
from outcome import Outcome, print_table, went_on_as_before
from worlds import run_world

import torchtitan_ext as tte

SAVE_STEP, LAST_STEP = 10, 16
SAVED_AXES = {"dp": 2, "tp": 2}
OTHER_AXES = [{"dp": 4, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}]


def train_and_save(axes: dict[str, int], checkpoint: str) -> Outcome:
    job = LlamaJob(axes, seed=0)
    job.train(last_step=SAVE_STEP)
    tte.save(job.state(), checkpoint, fingerprints=True)
    return Outcome(describe(axes), job.digests(), job.train(last_step=LAST_STEP))


def resume(axes: dict[str, int], checkpoint: str) -> Outcome:
    job = LlamaJob(axes, seed=1)  # Other weights: what is equal afterwards was loaded.
    state = job.state()
    stock = answer_of_stock(job, state, checkpoint)
    report = tte.load(state, checkpoint, prove=True)
    job.restore(state)
    num_proved = len(report.proof.proved)
    return Outcome(describe(axes), job.digests(), job.train(last_step=LAST_STEP), stock, num_proved)


def answer_of_stock(job: LlamaJob, state: dict[str, object], checkpoint: str) -> dict[str, str] | str:
    """What the tensors are after PyTorch's own load, or why it refuses. All ranks call it."""
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except dcp.api.CheckpointException as error:
        return str(error).strip().splitlines()[-1]
    job.restore(state)
    return job.digests()


def describe(axes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items()) or "one process"


def run(job: Callable[..., Outcome], axes: dict[str, int], checkpoint: str) -> Outcome:
    """Runs `train_and_save` or `resume` on every rank of a new world and says how it goes."""
    world_size, start = math.prod(axes.values()), time.perf_counter()
    print(f"{job.__name__}: world size {world_size}, {describe(axes)} ", end="", flush=True)
    outcome = run_world(job, axes, checkpoint, world_size=world_size)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    return outcome


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        saved = run(train_and_save, SAVED_AXES, f"{folder}/checkpoint")
        resumed = [run(resume, axes, f"{folder}/checkpoint") for axes in OTHER_AXES]
    print_table(saved, resumed)
    return 0 if all(went_on_as_before(saved, outcome) for outcome in resumed) else 1


if __name__ == "__main__":
    sys.exit(main())
