"""A job of torchrun that is asked to leave: `torchrun preempted_job.py FOLDER`.

`FOLDER/plan.json` has the number of steps, and what comes to which rank after how many seconds of its first life. Each
rank writes what happens to a journal of its own. Ranks meet in every third step only, so that some are ahead of others.
Ends with code 3 where it was stopped.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte

STOPPED = 3
EVERY = 7


def loss_of(step: int, weight: float) -> float:
    return (weight * 7 + step) % 13


def train(folder: Path, plan: dict[str, Any], life: int) -> bool:
    """Whether the job was stopped before its last step."""
    rank = dist.get_rank()
    journal = (folder / f"journal-{life}-{rank}").open("w", buffering=1)
    draw = random.Random(f"{plan['seed']} {life} {rank}")

    def note(what: str, **values: Any) -> None:
        journal.write(json.dumps({"what": what, **values}) + "\n")

    manager = tte.CheckpointManager(
        folder / "run", every=EVERY, asynchronous=plan["asynchronous"], signals=("SIGTERM", "SIGUSR1"), grace_seconds=60
    )
    for asked, seconds, kind in plan["requests"] if life == 0 else []:
        act = (
            manager.request_save if kind == "request" else lambda kind=kind: os.kill(os.getpid(), signal.Signals[kind])
        )
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        if asked == rank:
            timer.start()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(64), mesh, [Shard(0)])
    state = {"weight": weight, "step": 0}
    step = manager.resume(state)
    note("resumed", step=step)
    while step < plan["num_steps"] and not manager.should_stop:
        step += 1
        time.sleep(draw.uniform(0.01, 0.06))
        mean = state["weight"].to_local().mean()
        if step % 3 == 0:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        loss = loss_of(step, float(mean))
        with torch.no_grad():
            state["weight"] += loss
        state["step"] = step
        note("step", step=step, loss=loss)
        if manager.should_save(step):
            manager.save(state, step)
    note("left", step=step, stopped=manager.should_stop)
    manager.close()
    note("closed", steps=manager.steps())
    return manager.should_stop


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    is_stopped = train(place, json.loads((place / "plan.json").read_text()), 0)
    os._exit(STOPPED if is_stopped else 0)
