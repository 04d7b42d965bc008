"""What deltas cost and save: found, applied, in files, and over a plan beside the full transfer.

    python benchmarks/bench_delta.py

Prints ratios and writes results/delta_<machine>.json. In one process: finding the changes beside comparing both
versions by `memcmp` where they are equal, which reads each once; applying beside writing a byte into as many cache
lines; the bytes of a file. On gloo processes: a step, which finds, sends and applies the changes, checks included, and
brings the snapshot to the new version, beside a full run of the same plan; over the bare loopback, and over one of 1
Gbit/s: a network namespace of its own with a token bucket, which needs root. A time is the slowest rank's; contenders
take turns, and a ratio is the median of the rounds.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from result_file import write_results
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte

SHARES = [0.001, 0.01, 0.03, 0.3, 1.0]
CACHE_LINE = 64
NUM_SOURCES, NUM_TARGETS = 2, 2
SLOW = "1gbit"


def weights(num_megabytes: int, rows: int = 4096) -> dict[str, Tensor]:
    """Tensors of 16 MB of bf16."""
    return {f"w{index}": torch.randn(rows, 2048).bfloat16() for index in range(num_megabytes // 16)}


def change(tensors: list[Tensor], share: float) -> None:
    """Flips a bit of a random share of the elements."""
    for tensor in tensors:
        flat = tensor.view(-1).view(torch.int16)
        if share >= 1:
            flat.bitwise_xor_(1)
            continue
        chosen = torch.randint(flat.numel(), (round(share * flat.numel()),))
        flat[chosen.unique()] ^= 1


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare_by_memcmp(new: list[Tensor], base: list[Tensor]) -> None:
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pairs = list(zip(new, base, strict=True))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(lambda pair: libc.memcmp(pair[0].data_ptr(), pair[1].data_ptr(), pair[0].nbytes), pairs))


def in_one_process(num_megabytes: int, num_rounds: int) -> dict[str, Any]:
    state = weights(num_megabytes)
    new = list(state.values())
    equal = [tensor.clone() for tensor in new]
    base = tte.delta.Snapshot(state)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for share in SHARES:
            change(new, share)
            for tensor, copy in zip(new, equal, strict=True):
                copy.copy_(tensor)
            reads, finds = [], []
            for _ in range(num_rounds):
                reads.append(seconds(partial(compare_by_memcmp, new, equal)))
                finds.append(seconds(base.changes))
            changes = base.changes()
            path = Path(directory) / "changes.safetensors"
            tte.delta.save(changes, path)
            saved = tte.delta.load(path)
            lines = torch.empty(base.num_bytes // CACHE_LINE, CACHE_LINE, dtype=torch.uint8)
            some_lines = lines[:: max(1, len(lines) // changes.num_changed), 0]
            writes, applies = [], []
            for _ in range(num_rounds):
                target = {name: held.clone() for name, held in zip(state, changes.base, strict=True)}
                writes.append(seconds(partial(some_lines.fill_, 1)))
                applies.append(seconds(partial(tte.delta.apply, target, saved)))
            found[f"{share:.1%}"] = {
                "find_seconds": statistics.median(finds),
                "find_to_reading": median_ratio(finds, reads),
                "apply_seconds": statistics.median(applies),
                "apply_to_writing_lines": median_ratio(applies, writes),
                "file_bytes_per_change": path.stat().st_size / changes.num_changed,
                "memory_of_changes_to_state": changes.num_bytes / base.num_bytes,
            }
            base.advance()
            print(f"one process, {share:.1%}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[f"{share:.1%}"].items()))
    return found


def median_ratio(times: list[float], limits: list[float]) -> float:
    return statistics.median(time / limit for time, limit in zip(times, limits, strict=True))


def transfer(rank: int, store: str, num_megabytes: int, num_rounds: int, out: str) -> None:
    """Rows of the first ranks become columns of the others."""
    world_size = NUM_SOURCES + NUM_TARGETS
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    is_source = rank < NUM_SOURCES
    ranks = range(NUM_SOURCES) if is_source else range(NUM_SOURCES, world_size)
    mesh = DeviceMesh("cpu", list(ranks), _init_backend=False)
    shape = (4096 // len(ranks), 2048) if is_source else (4096, 2048 // len(ranks))
    placement = Shard(0) if is_source else Shard(1)
    local = {name: torch.randn(shape).bfloat16() for name in weights(num_megabytes, 1)}
    state = {
        name: DTensor.from_local(tensor, mesh, [placement], run_check=False, shape=(4096, 2048), stride=(2048, 1))
        for name, tensor in local.items()
    }
    plan = tte.transfer.plan_reshard(state if is_source else None, None if is_source else state)
    version = 0
    plan.run(version=version)
    base = tte.delta.Snapshot(state if is_source else None)
    results: dict[str, Any] = {}
    for share in SHARES:
        full, delta, num_bytes = [], [], 0
        for _ in range(num_rounds):
            full.append(slowest(partial(plan.run, version=version)))
            if is_source:
                change(list(local.values()), share)

            def step() -> None:
                nonlocal num_bytes
                changes = base.changes()
                num_bytes = plan.run(changes=changes if is_source else None).bytes_sent
                base.advance()

            version += 1
            delta.append(slowest(step))
        sent = torch.tensor(num_bytes)
        dist.all_reduce(sent)
        results[f"{share:.1%}"] = {
            "full_seconds": statistics.median(full),
            "delta_seconds": statistics.median(delta),
            "full_to_delta": median_ratio(full, delta),
            "megabytes_sent": int(sent) / 1e6,
        }
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def slowest(function: Callable[[], object]) -> float:
    dist.barrier()
    own = torch.tensor(seconds(function))
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return float(own)


def between_processes(num_megabytes: int, num_rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        store, out = str(Path(directory) / "store"), str(Path(directory) / "out")
        mp.spawn(transfer, (store, num_megabytes, num_rounds, out), nprocs=NUM_SOURCES + NUM_TARGETS)
        results: dict[str, Any] = json.loads(Path(out).read_text())
    return results


def over_slow_network(arguments: list[str]) -> dict[str, Any]:
    """The same in a network namespace whose loopback has a token bucket."""
    shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {SLOW} burst 256kb latency 200ms"
    with tempfile.NamedTemporaryFile() as out:
        command = " ".join([sys.executable, sys.argv[0], *arguments, "--only-processes", out.name])
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(["unshare", "--net", "sh", "-c", f"{shape} && {command}"], check=True, env=environment)
        results: dict[str, Any] = json.loads(Path(out.name).read_text())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of bf16 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-processes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"megabytes": options.megabytes, "rounds": options.rounds, "ranks": f"{NUM_SOURCES} to {NUM_TARGETS}"}
    if options.only_processes:
        results = between_processes(options.megabytes, options.rounds)
        Path(options.only_processes).write_text(json.dumps(results))
        return
    results = {"one process": in_one_process(options.megabytes, options.rounds)}
    results["loopback"] = between_processes(options.megabytes, options.rounds)
    arguments = ["--megabytes", str(options.megabytes), "--rounds", str(options.rounds)]
    results[f"loopback of {SLOW}"] = over_slow_network(arguments)
    for name in ("loopback", f"loopback of {SLOW}"):
        for share, of_share in results[name].items():
            print(f"{name}, {share}: " + ", ".join(f"{key} {value:.3f}" for key, value in of_share.items()))
    print(write_results("delta", sizes=sizes, results=results))


if __name__ == "__main__":
    main()
