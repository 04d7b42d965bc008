"""How long training waits for an asynchronous save, in steady state, against one memcpy into warm memory.

    python benchmarks/bench_staging.py [--rounds 10] [--saves 200] [--folder PATH]

One process. A stall is the time until the call of an asynchronous save returns; its upload ends outside of the clock.
"First" is a save for which no memory of an earlier one is there.
The contenders of a case take turns, round by round, and each keeps its best time. Prints a table, writes
results/staging_<machine>.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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
from result_file import status_bytes, write_results
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.checkpoint.staging.host_buffers import SPARE

MIB = 2**20
FIRST = "tte.async_save, first"
Start = Callable[[dict[str, Any], Path], Any]
State = dict[str, Any]

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def stall_seconds(start: Start, state: State, path: Path) -> float:
    begin = time.perf_counter()
    response = start(state, path)
    seconds = time.perf_counter() - begin
    getattr(response, "upload_completion", response).result()
    del response
    shutil.rmtree(path)
    return seconds


def once(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(state: State, limits: dict[str, Callable[[], Any]], folder: Path, rounds: int) -> dict[str, float]:
    """Best seconds of the limits, and of the stalls of all ways to save, which take turns."""
    kept = CpuStager()
    stock = DefaultStager(StagingOptions(False, False, False, False))

    ways: dict[str, Start] = {
        "tte.async_save, stager kept": lambda state, path: tte.async_save(state, path, stager=kept),
        FIRST: lambda state, path: tte.async_save(state, path),
        "tte.async_save": lambda state, path: tte.async_save(state, path),
        "dcp.async_save": lambda state, path: dcp.async_save(state, checkpoint_id=path),
        "dcp.async_save, stager kept": lambda state, path: dcp.async_save(
            state, checkpoint_id=path, async_stager=stock
        ),
    }
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, limit in limits.items():
            best[name] = min(best.get(name, 1e9), once(limit))
        for name, start in ways.items():
            if name == FIRST:
                SPARE.clear()
            best[name] = min(best.get(name, 1e9), stall_seconds(start, state, folder / "step"))
    return best


def memcpy_of(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """One memcpy for each contiguous tensor, into memory that was touched before."""
    warm = [torch.zeros_like(tensor) for tensor in tensors]
    pairs = [(to.data_ptr(), tensor.data_ptr(), tensor.nbytes) for to, tensor in zip(warm, tensors, strict=True)]

    def copy() -> None:
        for pair in pairs:
            _libc.memcpy(*pair)
        assert warm

    return copy


def flatten_of(tensors: list[torch.Tensor]) -> Callable[[], None]:
    buffer = torch.zeros(ops.flat_offsets(tensors)[-1], dtype=torch.uint8)
    return lambda: ops.flatten_into_(tensors, buffer)


def copies_of(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Packing by hand: each tensor's elements into contiguous memory that was touched before."""
    warm = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def copy() -> None:
        for to, tensor in zip(warm, tensors, strict=True):
            to.copy_(tensor)

    return copy


def memory_of_saves(state: State, folder: Path, num_saves: int) -> dict[str, float]:
    """Megabytes beyond the state after the first saves, and how much more after many."""
    stager = CpuStager()
    gc.collect()
    _libc.malloc_trim(0)
    before = status_bytes("VmRSS")
    first = 0.0
    for step in range(num_saves):
        stall_seconds(lambda state, path: tte.async_save(state, path, stager=stager), state, folder / "step")
        if step == 4:
            first = (status_bytes("VmRSS") - before) / 1e6
    growth = (status_bytes("VmRSS") - before) / 1e6 - first
    return {"beyond the state": round(first, 1), "growth": round(growth, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    store = tempfile.NamedTemporaryFile()  # noqa: SIM115
    dist.init_process_group("gloo", init_method=f"file://{store.name}_store", rank=0, world_size=1)

    large = [torch.randn(512 * MIB // 120 // 4) for _ in range(120)]
    small = [torch.randn(512) for _ in range(4000)]
    mesh = init_device_mesh("cpu", (1,))
    shards = [DTensor.from_local(tensor, mesh, [Shard(0)]) for tensor in small]
    columns = [torch.randn(2048, 2048)[:, : 2048 // 4] for _ in range(64)]
    cases = {
        "512 MB in 120 tensors": (large, {"memcpy": memcpy_of(large)}),
        "4,000 tensors of 2 KiB": (small, {"flatten_into_": flatten_of(small), "memcpy": memcpy_of(small)}),
        "4,000 DTensors of 2 KiB": (shards, {"flatten_into_": flatten_of(small), "memcpy": memcpy_of(small)}),
        "64 shards of columns, 256 MB": (columns, {"packed by hand": copies_of(columns)}),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for title, (tensors, limits) in cases.items():
            state = {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)}
            best = compare(state, limits, Path(folder), arguments.rounds)
            limit = best[next(iter(limits))]
            results[title] = {
                name: {"milliseconds": round(seconds * 1e3, 2), "ratio": round(seconds / limit, 2)}
                for name, seconds in best.items()
            }
            print(f"\n{title}")
            for name, row in results[title].items():
                print(f"  {name:32} {row['milliseconds']:9.2f} ms {row['ratio']:7.2f}", flush=True)
        state = {f"layers.{index}.weight": tensor for index, tensor in enumerate(large[:24])}
        memory = memory_of_saves(state, Path(folder), arguments.saves)
        results[f"memory of {arguments.saves} saves of 107 MB, in MB"] = memory
        print("\nmemory:", memory)
    path = write_results("staging", sizes={"rounds": arguments.rounds, "saves": arguments.saves}, results=results)
    print(f"\nwrote {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
