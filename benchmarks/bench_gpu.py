"""Saves, loads and moves of a state on a GPU, against one copy of its bytes between GPU and pinned memory.

    python benchmarks/bench_gpu.py [--rounds 5] [--gigabytes 2] [--folder /dev/shm]

One process with one GPU. A stall is the time until an asynchronous save returns; its upload ends outside of the clock.
The contenders of a case take turns, round by round, and each keeps its best time. Prints a table, writes
results/gpu_<machine>.json.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from result_file import write_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager

State = dict[str, Any]
Ways = dict[str, Callable[[], Any]]
"""By name; the first is the limit."""


def best_milliseconds(ways: Ways, rounds: int, written: Path) -> dict[str, float]:
    """Of each; what a way returns is waited for, and what it has written removed, outside of the clock."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            response = way()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            upload = getattr(response, "upload_completion", response)
            if hasattr(upload, "result"):
                upload.result()
            shutil.rmtree(written, ignore_errors=True)
            best[name] = min(best.get(name, 1e9), seconds * 1e3)
    return best


def copies(tensors: list[torch.Tensor], *, to_host: bool) -> Callable[[], None]:
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    source, target = (flat, pinned) if to_host else (pinned, flat)
    return lambda: target.copy_(source, non_blocking=True)


def cases_of(state: State, folder: Path, step: Path) -> dict[str, Ways]:
    tensors = list(state.values())
    kept = CpuStager()
    ours, theirs = folder / "ours", folder / "theirs"
    tte.save(state, ours)
    dcp.save(state, checkpoint_id=theirs)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    mesh = init_device_mesh("cuda", (1,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    moved = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
    plan = tte.transfer.plan_reshard(sharded, moved)

    def clone() -> None:
        torch._foreach_copy_(list(target.values()), tensors)

    return {
        "save": {
            "copy to pinned memory": copies(tensors, to_host=True),
            "tte.save": lambda: tte.save(state, step) and None,
            "dcp.save": lambda: dcp.save(state, checkpoint_id=step) and None,
        },
        "stall of an asynchronous save": {
            "copy to pinned memory": copies(tensors, to_host=True),
            "tte.async_save, stager kept": lambda: tte.async_save(state, step, stager=kept),
            "tte.async_save": lambda: tte.async_save(state, step),
            "dcp.async_save": lambda: dcp.async_save(state, checkpoint_id=step),
        },
        "load": {
            "copy from pinned memory": copies(tensors, to_host=False),
            "tte.load": lambda: tte.load(target, ours) and None,
            "dcp.load": lambda: dcp.load(target, checkpoint_id=theirs),
        },
        "within the GPU": {
            "_foreach_copy_": clone,
            "flatten_state_dict": lambda: tte.flatten_state_dict(state) and None,
            "a kept plan of tte.reshard": lambda: plan.run() and None,
            "tte.fingerprint": lambda: tte.fingerprint(state) and None,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    store = tempfile.mktemp()
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    torch.cuda.set_device(0)

    size = int(arguments.gigabytes * 1e9 / 120 / 4)
    states = {
        f"{arguments.gigabytes:g} GB in 120 tensors": [torch.randn(size, device="cuda") for _ in range(120)],
        "4,000 tensors of 64 KiB": [torch.randn(128, 128, device="cuda") for _ in range(4000)],
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        written = Path(folder) / "step"
        for title, tensors in states.items():
            state = {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)}
            for case, ways in cases_of(state, Path(folder), written).items():
                best = best_milliseconds(ways, arguments.rounds, written)
                limit = next(iter(best.values()))
                results[f"{case}: {title}"] = {
                    name: {"milliseconds": round(value, 2), "ratio": round(value / limit, 2)}
                    for name, value in best.items()
                }
                print(f"\n{case}: {title}")
                for name, value in best.items():
                    print(f"  {name:36} {value:9.2f} ms {value / limit:8.2f}", flush=True)
    sizes = {"rounds": arguments.rounds, "gigabytes": arguments.gigabytes, "gpu": torch.cuda.get_device_name()}
    print(f"\nwrote {write_results('gpu', sizes=sizes, results=results)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
