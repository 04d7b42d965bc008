"""The ops against a memcpy of the same bytes into warm memory and against the best stock way.

    python benchmarks/bench_ops.py [--threads 1] [--rounds 40] [--only TEXT] [--device cuda]
        [--core build/dev/bench_copy_runs]

Prints one table and, unless --only chooses cases, writes results/ops_<machine>.json. The contenders of a case take
turns, round by round, and each keeps its best time: what else the machine does hits all of them, and only ever slows.
A ratio is memcpy's best time over theirs: above 1 is faster than memcpy. With a GPU the same cases run on it too,
against a device-to-device copy, and once more without the host's part: the contenders replayed from CUDA graphs. The
kernel alone, with a ready list of runs, is a program of its own, built by
`cmake --build build/dev --target bench_copy_runs`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from result_file import write_results
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

MIB = 2**20
MEMCPY = "memcpy"
CALLS_IN_A_GRAPH = 10
Candidates = dict[str, Callable[[], Any]]
"""By name; ours begin with "ours", those that also allocate their result end with "(new memory)"."""

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def best_seconds(candidates: Candidates, device: str, rounds: int) -> dict[str, float]:
    def once(function: Callable[[], Any]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for function in candidates.values():
        once(function)
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, function in candidates.items():
            best[name] = min(best[name], once(function))
    return best


def replays(candidates: Candidates) -> Candidates:
    """The same work as graphs of ten calls each: what the host does between kernels is left out."""

    def replay(function: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_IN_A_GRAPH):
                function()
        return graph.replay

    return {name: replay(function) for name, function in candidates.items()}


def memcpy(dst: Tensor, src: Tensor) -> Callable[[], Any]:
    if dst.is_cuda:
        return lambda: dst.copy_(src)  # cudaMemcpyAsync
    return lambda: _libc.memcpy(dst.data_ptr(), src.data_ptr(), dst.nbytes)


def box(rows: int, columns: int, first_column: int) -> LocalShard:
    return LocalShard((rows, columns), (Chunk((0, first_column), (rows, columns), (0, 0)),))


def flatten_case(count: int, num_bytes: int, device: str) -> tuple[Candidates, int]:
    size = num_bytes // 4
    tensors = [torch.randn(size, device=device) for _ in range(count)]
    out, source = torch.empty(count * size, device=device), torch.randn(count * size, device=device)
    parts = list(out.split(size))
    return {
        MEMCPY: memcpy(out, source),
        "ours": lambda: ops.flatten_into_(tensors, out, alignment=4),
        "ours unflatten": lambda: ops.unflatten_tensors_(tensors, out, alignment=4),
        "cat(out=) of 1-d tensors": lambda: torch.cat(tensors, out=out),
        "cat(out=) of reshape(-1)": lambda: torch.cat([tensor.reshape(-1) for tensor in tensors], out=out),
        "_foreach_copy_": lambda: torch._foreach_copy_(parts, tensors),
        "_flatten_dense_tensors (new memory)": lambda: torch._utils._flatten_dense_tensors(tensors),
    }, count * num_bytes


def pack_case(run_bytes: int, device: str, num_bytes: int = 128 * MIB) -> tuple[Candidates, int]:
    """A column shard of a tensor four times as wide: rows of run_bytes, into warm memory."""
    columns = run_bytes // 4
    rows = num_bytes // run_bytes
    full = torch.randn(rows, 4 * columns, device=device)
    out, source = torch.empty(rows, columns, device=device), torch.randn(rows, columns, device=device)
    view = full[:, columns : 2 * columns]
    shard, whole = box(rows, columns, columns), box(rows, columns, 0)
    indices = torch.arange(columns, 2 * columns, device=device)
    candidates: Candidates = {
        MEMCPY: memcpy(out, source),
        "ours": lambda: ops.unpack_shard_(out, view, whole),
        "ours unpack": lambda: ops.unpack_shard_(full, out, shard),
        "ours pack_shard (new memory)": lambda: ops.pack_shard(full, shard),
        "narrow + copy_": lambda: out.copy_(view),
        "narrow().contiguous() (new memory)": lambda: view.contiguous(),
    }
    if run_bytes <= 1024:
        candidates["index_select(out=)"] = lambda: torch.index_select(full, 1, indices, out=out)
    return candidates, num_bytes


def row_block_case(run_bytes: int, device: str, num_bytes: int = 128 * MIB) -> tuple[Candidates, int]:
    """Every other block of rows: a shard of many boxes."""
    columns = 1024
    block = run_bytes // (4 * columns)
    count = num_bytes // run_bytes
    full = torch.randn(2 * count * block, columns, device=device)
    rows = count * block
    out, source = torch.empty(rows, columns, device=device), torch.randn(rows, columns, device=device)
    chunks = tuple(Chunk((2 * i * block, 0), (block, columns), (i * block, 0)) for i in range(count))
    shard = LocalShard((rows, columns), chunks)
    blocks = full.view(count, 2, block, columns)[:, 0]
    return {
        MEMCPY: memcpy(out, source),
        "ours": lambda: _pack_into(out, blocks),
        "ours unpack (table of boxes)": lambda: ops.unpack_shard_(full, out, shard),
        "view + copy_": lambda: out.view(count, block, columns).copy_(blocks),
    }, num_bytes


def _whole(shape: torch.Size) -> LocalShard:
    zeros = (0,) * len(shape)
    return LocalShard(tuple(shape), (Chunk(zeros, tuple(shape), zeros),))


def _pack_into(out: Tensor, view: Tensor) -> None:
    ops.unpack_shard_(out.view(view.shape), view, _whole(view.shape))


def fingerprint_case(dtype: torch.dtype, device: str, num_bytes: int = 128 * MIB) -> tuple[Candidates, int]:
    tensor = torch.randn(num_bytes // dtype.itemsize // 1024, 1024, device=device).to(dtype)
    out, shard = torch.empty_like(tensor), _whole(tensor.shape)
    return {
        MEMCPY: memcpy(out, tensor),
        "ours": lambda: ops.fingerprint_shard(tensor, shard, tensor.shape),
    }, num_bytes


def small_call_case(device: str) -> tuple[Candidates, int]:
    src = torch.randn(6, 8, device=device)
    shard = box(6, 2, 2)
    local = ops.pack_shard(src, shard)
    raw = torch.ops.torchtitan_ext.unpack_shard_
    table = [0, 2, 6, 2, 0, 0]

    def hundred(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [function() for _ in range(100)]

    def without_bump() -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            raw(src, (0, 0), local, table)

    return {
        "clone (stock)": hundred(lambda: local.clone()),
        "narrow().contiguous() (stock)": hundred(lambda: src[:, 2:4].contiguous()),
        "pack_shard": hundred(lambda: ops.pack_shard(src, shard)),
        "unpack_shard_": hundred(lambda: ops.unpack_shard_(src, local, shard)),
        "unpack_shard_ without version bump": hundred(without_bump),
        "increment_version alone": hundred(lambda: torch.autograd.graph.increment_version(src)),
        "unpack_shard_ through torch.ops": hundred(lambda: raw(src, (0, 0), local, table)),
    }, 0


class Case(NamedTuple):
    """Goals are ratios to memcpy, and those to the best stock way that makes no new memory."""

    name: str
    make: Callable[[str], tuple[Candidates, int]]
    goal: float = 0.0
    goal_to_stock: float = 0.0


CASES = [
    Case("flatten 128 MiB in 300", lambda device: flatten_case(300, 447_392, device), 0.95),
    Case("flatten 128 MiB in 5,000", lambda device: flatten_case(5000, 26_844, device), 0.95),
    Case("flatten 5,000 x 1 KiB", lambda device: flatten_case(5000, 1024, device), goal_to_stock=2.0),
    Case("pack columns, runs of 256 B", lambda device: pack_case(256, device), 0.7),
    Case("pack columns, runs of 1 KiB", lambda device: pack_case(1024, device)),
    Case("pack columns, runs of 4 KiB", lambda device: pack_case(4096, device)),
    Case("pack columns, runs of 16 KiB", lambda device: pack_case(16384, device), 0.85),
    Case("pack row blocks of 32 KiB", lambda device: row_block_case(32 << 10, device), 0.95),
    Case("pack row blocks of 256 KiB", lambda device: row_block_case(256 << 10, device), 0.95),
    Case("fingerprint, float32", lambda device: fingerprint_case(torch.float32, device)),
    Case("fingerprint, bfloat16", lambda device: fingerprint_case(torch.bfloat16, device)),
]


def run_case(case: Case, device: str, rounds: int) -> dict[str, Any]:
    candidates, num_bytes = case.make(device)
    seconds = best_seconds(candidates, device, rounds if num_bytes > MIB * 16 else 20 * rounds)
    kernels = {} if device == "cpu" else best_seconds(replays(candidates), device, rounds)
    ratios = {name: seconds[MEMCPY] / best for name, best in seconds.items()}
    stock = {n: r for n, r in ratios.items() if not n.startswith(("ours", MEMCPY)) and not n.endswith("(new memory)")}
    best_stock = max(stock, key=lambda name: stock[name], default=None)
    to_stock = None if best_stock is None else ratios["ours"] / stock[best_stock]
    reached = ratios["ours"] >= case.goal and (to_stock or 0.0) >= case.goal_to_stock
    has_goal = case.goal > 0 or case.goal_to_stock > 0
    goal = f"{case.goal:.2f}" if case.goal else f"{case.goal_to_stock:.0f} x stock" if has_goal else ""
    told = {True: "yes", False: "no"}[reached] if has_goal else ""
    stock_told = "" if best_stock is None else f"{stock[best_stock]:.2f} {best_stock}"
    print(f"{device:5}{case.name:30} {ratios['ours']:5.2f}  {goal:10} {told:8} {stock_told}", flush=True)
    if kernels:
        others = {name: kernels[MEMCPY] / best for name, best in kernels.items() if name != MEMCPY}
        print("       replayed: " + ", ".join(f"{ratio:.2f} {name}" for name, ratio in others.items()), flush=True)
    return {
        "num_bytes": num_bytes,
        "ratio_to_memcpy": round(ratios["ours"], 3),
        "goal": goal,
        "reached": reached if has_goal else None,
        "best_stock": best_stock,
        "ratio_to_best_stock": None if to_stock is None else round(to_stock, 2),
        "best_ms": {name: round(best * 1e3, 4) for name, best in seconds.items()},
        "replayed_ms": {name: round(best * 1e3 / CALLS_IN_A_GRAPH, 4) for name, best in kernels.items()},
    }


def run_small_calls(device: str, rounds: int) -> dict[str, float]:
    candidates, _ = small_call_case(device)
    micros = {name: round(best * 1e4, 2) for name, best in best_seconds(candidates, device, 20 * rounds).items()}
    print(f"\n{device}: one small call, us (goal for ours: under 5)")
    for name, value in micros.items():
        print(f"  {name:40} {value:6.2f}")
    return micros


def run_core(program: Path) -> dict[str, Any]:
    """Ratios to memcpy of the kernel with a ready list of runs, on one thread."""
    results = json.loads(subprocess.check_output([str(program)]))
    print("\nthe kernel alone, one thread (goal for 5,000 x 1 KiB: 0.9)")
    for name, result in results.items():
        print(f"  {name:40} {result['ratio']:5.2f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="cases whose name contains this; writes no file")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default both, where there is a GPU")
    parser.add_argument("--core", type=Path, default=Path("build/dev/bench_copy_runs"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'ratios to memcpy':35} {'ours':>5}  {'goal':10} {'reached':8} best stock way into warm memory")
    results: dict[str, Any] = {}
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in there if arguments.device is None else [arguments.device]:
        with torch.no_grad():
            results[device] = {
                case.name: run_case(case, device, arguments.rounds) for case in CASES if arguments.only in case.name
            }
            results[device]["small call, us"] = run_small_calls(device, arguments.rounds)
    if arguments.core.exists():
        results["core"] = run_core(arguments.core)
    if not arguments.only:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CUDA not run"
        sizes = {"threads": arguments.threads, "rounds": arguments.rounds, "gpu": gpu}
        print(f"\nwritten: benchmarks/results/{write_results('ops', sizes=sizes, results=results).name}")


if __name__ == "__main__":
    main()
