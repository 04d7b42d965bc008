"""What listening for signals costs a run that gets none: ``should_save`` in each step, and the thread that asks.

    python benchmarks/bench_preemption.py [--ranks 8] [--steps 20000] [--idle-seconds 10]

Ranks of gloo on one machine, which find each other through a TCP store. Managers that listen and managers that do not
take turns; what a step pays is the time of the call, of the slowest rank. The thread is measured by the processor time
of a process that does nothing else. Prints a table, writes results/preemption_<machine>.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from result_file import write_results

import torchtitan_ext as tte

ROUNDS = 5


def microseconds_a_step(manager: tte.CheckpointManager, num_steps: int) -> float:
    begin = time.perf_counter()
    for step in range(1, num_steps + 1):
        manager.should_save(step)
    return (time.perf_counter() - begin) / num_steps * 1e6


def work(rank: int, num_ranks: int, port: int, folder: str, num_steps: int, idle_seconds: float, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0, timeout=timedelta(seconds=100))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    taken: dict[str, list[float]] = {"listens": [], "does not": []}
    for _ in range(ROUNDS):
        for name in taken:
            options: dict[str, Any] = {"signals": ("SIGTERM", "SIGUSR1"), "grace_seconds": 30}
            with tte.CheckpointManager(folder, every=10**9, **(options if name == "listens" else {})) as manager:
                dist.barrier()
                taken[name].append(microseconds_a_step(manager, num_steps))
    idle = {}
    for name in ("idle", "idle and listens"):
        with tte.CheckpointManager(folder, signals=["SIGTERM"] if name == "idle and listens" else ()):
            dist.barrier()
            begin = time.process_time()
            time.sleep(idle_seconds)
            idle[name] = (time.process_time() - begin) / idle_seconds * 1e6
    results[rank] = {name: statistics.median(times) for name, times in taken.items()} | idle
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--idle-seconds", type=float, default=10)
    options = parser.parse_args()
    port = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False).port
    with mp.Manager() as manager, tempfile.TemporaryDirectory(prefix="tte_") as folder:
        results = manager.dict()
        given = (options.ranks, port, str(Path(folder) / "run"), options.steps, options.idle_seconds, results)
        mp.spawn(work, given, nprocs=options.ranks)
        of_ranks = list(results.values())
    found = {
        "microseconds_a_step": round(max(one["listens"] for one in of_ranks), 2),
        "microseconds_a_step_without": round(max(one["does not"] for one in of_ranks), 2),
        "processor_microseconds_a_second": round(max(one["idle and listens"] for one in of_ranks)),
        "processor_microseconds_a_second_without": round(max(one["idle"] for one in of_ranks)),
    }
    for name, value in found.items():
        print(f"{name:40} {value:10.2f}")
    sizes = {"ranks": options.ranks, "steps": options.steps, "rounds": ROUNDS, "idle_seconds": options.idle_seconds}
    print(write_results("preemption", sizes=sizes, results=found))


if __name__ == "__main__":
    main()
