"""The ops against a memcpy of the same bytes into warm memory and against the best stock way.

    python benchmarks/bench_ops.py [--threads 1] [--write]

Each case runs all its candidates in turn, many times, and keeps the best of each: what else runs on the machine hits
all of them. A ratio above 1 is faster than memcpy. With a GPU the same cases run on it, against a device-to-device
copy. The kernel alone, with a ready list of runs, is measured where `cmake --build build/dev --target bench_copy_runs`
was run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import write_results
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout import Chunk, LocalShard

MIB = 2**20
Candidates = dict[str, Callable[[], Any]]

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def best_ms(candidates: Candidates, device: str, repeats: int) -> dict[str, float]:
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
    for _ in range(repeats):
        for name, function in candidates.items():
            best[name] = min(best[name], once(function))
    return {name: round(seconds * 1e3, 4) for name, seconds in best.items()}


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
        "memcpy": memcpy(out, source),
        "ours": lambda: ops.flatten_into_(tensors, out, alignment=4),
        "ours unflatten": lambda: ops.unflatten_tensors_(tensors, out, alignment=4),
        "cat(out=)": lambda: torch.cat(tensors, out=out),
        "_foreach_copy_": lambda: torch._foreach_copy_(parts, tensors),
        "_flatten_dense_tensors": lambda: torch._utils._flatten_dense_tensors(tensors),
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
        "memcpy": memcpy(out, source),
        "ours": lambda: ops.unpack_shard_(out, view, whole),
        "ours unpack": lambda: ops.unpack_shard_(full, out, shard),
        "ours pack_shard (new memory)": lambda: ops.pack_shard(full, shard),
        "narrow + copy_": lambda: out.copy_(view),
        "narrow().contiguous() (new memory)": lambda: view.contiguous(),
    }
    if run_bytes <= 1024:
        candidates["index_select (out=)"] = lambda: torch.index_select(full, 1, indices, out=out)
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
        "memcpy": memcpy(out, source),
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
        "memcpy": memcpy(out, tensor),
        "ours": lambda: ops.fingerprint_shard(tensor, shard, tensor.shape),
    }, num_bytes


def small_call_case(device: str) -> tuple[Candidates, int]:
    src = torch.randn(6, 8, device=device)
    shard = box(6, 2, 2)
    local = ops.pack_shard(src, shard)
    raw = torch.ops.torchtitan_ext.unpack_shard_
    table = [0, 2, 6, 2, 0, 0]

    def thousand(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [function() for _ in range(1000)] and None

    def without_bump() -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            raw(src, (0, 0), local, table)

    return {
        "clone (stock)": thousand(lambda: local.clone()),
        "narrow().contiguous() (stock)": thousand(lambda: src[:, 2:4].contiguous()),
        "pack_shard": thousand(lambda: ops.pack_shard(src, shard)),
        "unpack_shard_": thousand(lambda: ops.unpack_shard_(src, local, shard)),
        "unpack_shard_ without version bump": thousand(without_bump),
        "increment_version alone": thousand(lambda: torch.autograd.graph.increment_version(src)),
        "unpack_shard_ through torch.ops": thousand(lambda: raw(src, (0, 0), local, table)),
    }, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="write the result file")
    parser.add_argument("--build", type=Path, default=Path("build/dev"), help="where bench_copy_runs was built")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        cases: dict[str, Callable[[], tuple[Candidates, int]]] = {
            "flatten 128 MiB in 300": lambda d=device: flatten_case(300, 447_392, d),
            "flatten 128 MiB in 5,000": lambda d=device: flatten_case(5000, 26_844, d),
            "flatten 5,000 x 1 KiB": lambda d=device: flatten_case(5000, 1024, d),
            **{
                f"pack columns, runs of {run} B": lambda d=device, r=run: pack_case(r, d)
                for run in (256, 1024, 4096, 16384)
            },
            **{f"pack row blocks of {run} B": lambda d=device, r=run: row_block_case(r, d) for run in (32768, 262144)},
            "fingerprint float32": lambda d=device: fingerprint_case(torch.float32, d),
            "fingerprint bfloat16": lambda d=device: fingerprint_case(torch.bfloat16, d),
            "small call (us)": lambda d=device: small_call_case(d),
        }
        for name, make in cases.items():
            candidates, num_bytes = make()
            with torch.no_grad():
                times = best_ms(candidates, device, arguments.repeats)
            entry: dict[str, Any] = {"ms" if num_bytes else "us": times, "num_bytes": num_bytes}
            if num_bytes:
                entry["ratio_to_memcpy"] = {key: round(times["memcpy"] / value, 3) for key, value in times.items()}
            results[f"{device}: {name}"] = entry
            print(f"{device}: {name}", json.dumps(entry.get("ratio_to_memcpy", times)), flush=True)
            del candidates
    core = arguments.build / "bench_copy_runs"
    if core.exists():
        results["kernel alone, ready list of runs, one thread"] = json.loads(subprocess.check_output([str(core)]))
        print("core", json.dumps(results["kernel alone, ready list of runs, one thread"]))
    if arguments.write:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CUDA not run"
        sizes = {"threads": arguments.threads, "repeats": arguments.repeats, "best_of": "repeats", "gpu": gpu}
        print(write_results("ops", sizes=sizes, results=results))


if __name__ == "__main__":
    main()
