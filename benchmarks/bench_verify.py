"""What verifying costs a load: nothing verified, the rule of version 0.1, each block once (the default), each rank all.

    python benchmarks/bench_verify.py [--gigabytes 0.5] [--processes 1 2 4] [--rounds 7] [--directory PATH]

Files in the page cache, one thread for each process. "half" is the rule before each block was verified: a rank verifies
blocks of which it reads at least half, and nobody the others. Cases: a state saved by rows and loaded by rows or by
columns; one row of each tensor; one of 64 shards of rows. Prints tables, writes results/verify_<machine>.json.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest import compare, print_rows
from measured_worlds import run_worlds
from result_file import write_results
from storage_states import COLUMNS, ROWS, State, filled, large, small
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.storage import FileReader


class HalfReader(FileReader):
    """Verifies by the rule of version 0.1."""

    has_unverified_blocks = False

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.leaves_blocks = True

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, True if name == "leaves_blocks" else value)


def load(state: State, path: Path, rule: str) -> None:
    reader = HalfReader(path, thread_count=1) if rule == "half" else FileReader(path, rule, thread_count=1)  # type: ignore[arg-type]
    tte.load(state, storage_reader=reader)


def window(whole: torch.Tensor, first: int, last: int) -> Any:
    """Rows of a tensor that this rank wants, as the tensor describes them itself."""
    part: Any = torch.zeros(last - first, *whole.shape[1:], dtype=whole.dtype)
    part.global_shape, part.global_offsets = tuple(whole.shape), ((first, *(0 for _ in whole.shape[1:])),)
    part.local_offsets, part.local_sizes = ((0,) * whole.dim(),), (tuple(part.shape),)
    return part


def run(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    workloads = {
        f"{options.gigabytes:g} GB": large(options.gigabytes, torch.float32, world_size),
        "4,000 x 2 KiB": small(torch.float32),
    }
    for name, workload in workloads.items():
        path = folder / name.replace(",", "")
        state = filled(workload, mesh, ROWS)
        tte.save(state, path)
        rows = {key: value.shape[0] for key, value in state.items()}
        targets = {
            "rows": state,
            "columns": filled(workload, mesh, COLUMNS),
            "a row of each": {key: window(value, rows[key] // 2, rows[key] // 2 + 1) for key, value in state.items()},
            "a shard of 64": {key: window(value, 0, max(1, rows[key] // 64)) for key, value in state.items()},
        }
        for case, target in targets.items():
            if case == "columns" and world_size == 1:
                continue
            rules = ("none", "half", "auto", "all")
            found = compare({rule: partial(load, target, path, rule) for rule in rules}, options.rounds, limit="none")
            if rank == 0:
                results[f"{world_size} processes, {name}, {case}"] = found
                print_rows(f"{world_size} processes, {name}, {case}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measured = run_worlds(run, options.processes, options.directory, options)
    sizes = {"gigabytes": options.gigabytes, "rounds": options.rounds, "threads_per_process": 1}
    print(write_results("verify", sizes=sizes, results=measured))


if __name__ == "__main__":
    main()
