"""Bringing the tensors of one rank to all others, on gloo processes of one machine: ours against what PyTorch has.

    python benchmarks/bench_sync.py

Prints four tables per world size and writes results/sync_<machine>.json:
  1. every way to send each workload, as a multiple of the limit: one broadcast of the same bytes from a flat buffer,
     packed before and never unpacked;
  2. what agreement and proof add, as a share of the sync;
  3. the op by `bucket_bytes`: time and extra memory;
  4. tensors of one size, each in a message of its own or packed: where a message costs more than two copies.
A time is the slowest rank's. The contenders take turns, round by round, and a ratio is the median over rounds of time
over the limit's time in the same round: what else the machine does hits all alike. Memory is the growth of the largest
resident set over all ranks, while the freed memory of earlier calls has been given back.
"""

import argparse
import ctypes
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from result_file import status_bytes, write_results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.utils import _sync_params_and_buffers

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.sync import sync_state_dict

WORLD_SIZES = [2, 4]
BUCKETS = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20]
ONE_SIZE_TOTAL = 16 << 20
ONE_SIZES = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20]
LIMIT = "limit: one flat broadcast"
OURS = "ops.broadcast_coalesced_"
Contenders = Mapping[str, Callable[[], object]]


def large_workload() -> list[Tensor]:
    """300 tensors, 341 MB of float32: 50 layers of two norms, two projections and two FFN weights."""
    layer = [(512,), (512, 512), (512, 512), (512,), (1152, 512), (1152, 512)]
    return [torch.zeros(shape) for _ in range(50) for shape in layer]


def small_workload() -> list[Tensor]:
    """5,000 tensors of 1 KiB."""
    return [torch.zeros(256) for _ in range(5_000)]


def mixed_workload() -> list[Tensor]:
    """480 tensors, 107 MB, in five dtypes: quantised layers with scales, masks and counters."""
    layer = [
        *(torch.zeros(768, 768, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16)),
        *(torch.zeros(768, dtype=dtype) for dtype in (torch.float32, torch.bool)),
        torch.zeros((), dtype=torch.int64),
    ]
    return [torch.zeros_like(tensor) for _ in range(60) for tensor in [*layer, *layer[2:]]]


WORKLOADS = {"300 tensors, 341 MB": large_workload, "5,000 x 1 KiB": small_workload, "mixed dtypes": mixed_workload}


def num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def contenders_for(tensors: list[Tensor]) -> Contenders:
    world = dist.group.WORLD
    assert world is not None
    flat = torch.zeros(num_bytes(tensors), dtype=torch.uint8)
    return {
        LIMIT: lambda: dist.broadcast(flat, 0),
        OURS: lambda: ops.broadcast_coalesced_(tensors, world.group_name),
        "tte.sync.broadcast_tensors, agreed": lambda: tte.sync.broadcast_tensors(tensors),
        "_sync_params_and_buffers, 250 MiB": lambda: _sync_params_and_buffers(world, tensors, 250 << 20, 0),
        "_broadcast_coalesced, 250 MiB": lambda: dist._broadcast_coalesced(world, tensors, 250 << 20, 0),
        "_broadcast_coalesced, 25 MiB": lambda: dist._broadcast_coalesced(world, tensors, 25 << 20, 0),
        "per tensor, sync": lambda: broadcast_each(tensors, asynchronous=False),
        "per tensor, async": lambda: broadcast_each(tensors, asynchronous=True),
    }


def broadcast_each(tensors: list[Tensor], *, asynchronous: bool) -> None:
    works = [dist.broadcast(as_bytes(tensor), 0, async_op=asynchronous) for tensor in tensors]
    if asynchronous:
        for work in works:
            work.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    """gloo refuses some dtypes, fp8 among them."""
    return tensor.view(-1).view(torch.uint8)


def slowest_seconds(function: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def extra_bytes(function: Callable[[], object]) -> int:
    """Growth of the largest resident set during a call, on the rank where it grows most."""
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    function()
    growth = torch.tensor([status_bytes("VmHWM") - before])
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    return int(growth.item())


def compare(contenders: Contenders, num_rounds: int) -> dict[str, Any]:
    """Of each contender the median time, the median ratio to the first one, and the memory; or why it is refused."""
    refused = {name: reason for name, function in contenders.items() if (reason := first_call(function))}
    taking_part = {name: function for name, function in contenders.items() if name not in refused}
    seconds: dict[str, list[float]] = {name: [] for name in taking_part}
    for _ in range(num_rounds):
        for name, function in taking_part.items():
            seconds[name].append(slowest_seconds(function))
    limit = next(iter(seconds.values()))
    measured = {
        name: {
            "seconds": statistics.median(of_name),
            "min_seconds": min(of_name),
            "ratio": statistics.median(mine / other for mine, other in zip(of_name, limit, strict=True)),
            "extra_bytes": extra_bytes(taking_part[name]),
        }
        for name, of_name in seconds.items()
    }
    return {**measured, **{name: {"refused": reason} for name, reason in refused.items()}}


def first_call(function: Callable[[], object]) -> str:
    """Warms up. A refusal by the backend comes on all ranks alike, before anything moves."""
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0][:120]
    return ""


def shares(tensors: list[Tensor], num_rounds: int) -> dict[str, Any]:
    """What agreement and proof cost next to the bare op. The names are there too, as in a state dict."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)}
    return compare(
        {
            OURS: lambda: ops.broadcast_coalesced_(tensors, dist.group.WORLD.group_name),
            "sync_state_dict": lambda: sync_state_dict(state, mesh),
            "sync_state_dict, verify=True": lambda: sync_state_dict(state, mesh, verify=True),
            "check_replicas alone": lambda: tte.check_replicas(state, mesh),
        },
        num_rounds,
    )


def by_bucket(tensors: list[Tensor], num_rounds: int) -> dict[str, Any]:
    flat = torch.zeros(num_bytes(tensors), dtype=torch.uint8)
    name = dist.group.WORLD.group_name
    op = functools.partial(ops.broadcast_coalesced_, tensors, name)
    by_size = {f"{size >> 10} KiB": functools.partial(op, bucket_bytes=size) for size in BUCKETS}
    return compare({LIMIT: lambda: dist.broadcast(flat, 0), **by_size}, num_rounds)


def own_or_packed(size: int, num_rounds: int) -> dict[str, Any]:
    """A message each, all in flight at once, against a kept buffer and two copies."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(ONE_SIZE_TOTAL // size)]
    flat = ops.flatten_tensors(tensors)
    is_source = dist.get_rank() == 0

    def packed() -> None:
        for start in range(0, len(tensors), per_bucket):
            members = tensors[start : start + per_bucket]
            bucket = flat[: size * len(members)]
            if is_source:
                torch.cat(members, out=bucket)
            dist.broadcast(bucket, 0)
            if not is_source:
                ops.unflatten_tensors_(members, bucket)

    per_bucket = max(1, ops.DEFAULT_BUCKET_BYTES // size)
    return compare(
        {
            LIMIT: lambda: dist.broadcast(flat, 0),
            "own messages": lambda: broadcast_each(tensors, asynchronous=True),
            "packed": packed,
            OURS: lambda: ops.broadcast_coalesced_(tensors, dist.group.WORLD.group_name),
        },
        num_rounds,
    )


def run_rank(rank: int, world_size: int, folder: str, num_rounds: int) -> None:
    torch.set_num_threads(1)  # The ranks share this machine's cores.
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    results: dict[str, Any] = {"contenders": {}, "shares": {}, "buckets": {}, "one_size": {}}
    for name, build in WORKLOADS.items():
        tensors = build()
        results["contenders"][name] = compare(contenders_for(tensors), num_rounds)
        results["shares"][name] = shares(tensors, num_rounds)
        results["buckets"][name] = by_bucket(tensors, num_rounds)
    for size in ONE_SIZES:
        results["one_size"][f"{size >> 10} KiB"] = own_or_packed(size, num_rounds)
    if rank == 0:
        torch.save(results, Path(folder, "results"))
    dist.destroy_process_group()


def run_world(world_size: int, num_rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (world_size, folder, num_rounds), nprocs=world_size, start_method="forkserver")
        return torch.load(Path(folder, "results"))


def print_tables(world_size: int, results: dict[str, Any]) -> None:
    for part, of_part in results.items():
        for name, rows in of_part.items():
            print(f"\n{f'{world_size} processes, {part}: {name}':52} {'time':>11} {'ratio':>7} {'memory':>9}")
            for contender, row in rows.items():
                told = row.get("refused") or (
                    f"{row['seconds'] * 1e3:8.1f} ms {row['ratio']:7.2f} {row['extra_bytes'] / 1e6:6.1f} MB"
                )
                print(f"  {contender:50} {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="times are medians of this many (default: 7)")
    num_rounds = parser.parse_args().rounds
    results = {}
    for world_size in WORLD_SIZES:
        results[f"{world_size} processes"] = run_world(world_size, num_rounds)
        print_tables(world_size, results[f"{world_size} processes"])
    sizes = {"backend": "gloo", "rounds": num_rounds, "bucket_bytes": ops.DEFAULT_BUCKET_BYTES}
    sizes["workload_bytes"] = {name: num_bytes(build()) for name, build in WORKLOADS.items()}
    path = write_results("sync", sizes=sizes, results=results)
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
