"""Trains a tiny Llama on 4 gloo processes as FSDP2 2 x TP 2, saves it, and resumes on other meshes, bit for bit.

python examples/train_llama_2d.py                    # with the planners of torchtitan_ext
python examples/train_llama_2d.py --planner stock    # shows where those of PyTorch stop
"""

import argparse
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
PLANNERS = {
    "torchtitan_ext": (tte.SavePlanner(), tte.LoadPlanner()),
    "stock": (dcp.DefaultSavePlanner(), dcp.DefaultLoadPlanner()),
}


def train_and_save(axes: dict[str, int], checkpoint: str, planner: dcp.SavePlanner) -> Outcome:
    job = LlamaJob(axes, seed=0)
    job.train(last_step=SAVE_STEP)
    dcp.save(job.state(), checkpoint_id=checkpoint, planner=planner)
    return Outcome(describe(axes), job.digests(), job.train(last_step=LAST_STEP))


def resume(axes: dict[str, int], checkpoint: str, planner: dcp.LoadPlanner) -> Outcome:
    job = LlamaJob(axes, seed=1)  # Other weights: what is equal afterwards was loaded.
    state = job.state()
    try:
        dcp.load(state, checkpoint_id=checkpoint, planner=planner)
    except dcp.api.CheckpointException as error:
        return Outcome(describe(axes), {}, [], refusal=str(error).strip().splitlines()[-1])
    job.restore(state)
    return Outcome(describe(axes), job.digests(), job.train(last_step=LAST_STEP))


def describe(axes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items()) or "one process"


def run(job: Callable[..., Outcome], axes: dict[str, int], checkpoint: str, planner: object) -> Outcome:
    """Runs `train_and_save` or `resume` on every rank of a new world and says how it goes."""
    world_size, start = math.prod(axes.values()), time.perf_counter()
    print(f"{job.__name__}: world size {world_size}, {describe(axes)} ", end="", flush=True)
    outcome = run_world(job, axes, checkpoint, planner, world_size=world_size)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planner", choices=PLANNERS, default="torchtitan_ext")
    save_planner, load_planner = PLANNERS[parser.parse_args().planner]
    with tempfile.TemporaryDirectory() as folder:
        saved = run(train_and_save, SAVED_AXES, f"{folder}/checkpoint", save_planner)
        resumed: list[Outcome] = []
        for axes in OTHER_AXES:
            resumed.append(run(resume, axes, f"{folder}/checkpoint", load_planner))
            if resumed[-1].refusal:
                break
    print_table(saved, resumed)
    return 0 if all(went_on_as_before(saved, outcome) for outcome in resumed) else 1


if __name__ == "__main__":
    sys.exit(main())
