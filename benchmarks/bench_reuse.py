"""Seconds and bytes of each save of a small trained part on a large frozen base, with and without ``reuse``.

    python benchmarks/bench_reuse.py [--megabytes 512] [--rounds 5] [--folder PATH]

One process. The base is frozen, a fiftieth of its size changes before each save. The ways to save take turns, round by
round; each keeps its best time, and the bytes of its last save. Every save is on the disk when it ends. Prints a table,
writes results/reuse_<machine>.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from result_file import write_results

import torchtitan_ext as tte

NUM_BASE = 50


def state_of(megabytes: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    num_elements = megabytes * 2**20 // NUM_BASE // 2
    base = {
        f"base.{number}": torch.rand(num_elements, generator=generator).to(torch.bfloat16) for number in range(NUM_BASE)
    }
    return base | {"adapter": torch.full((num_elements,), float(step), dtype=torch.bfloat16), "step": step}


WAYS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "tte.save, reuse": lambda state, path: tte.save(state, path, reuse="latest", no_dist=True),
    "tte.save": lambda state, path: tte.save(state, path, no_dist=True),
    "tte.save, fingerprints": lambda state, path: tte.save(state, path, fingerprints=True, no_dist=True),
    "dcp.save": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
}


def new_bytes(path: Path) -> int:
    """Of the files that no other checkpoint has."""
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="tte_reuse_", dir=options.folder))
    state = state_of(options.megabytes, 0)
    results: dict[str, dict[str, float]] = {}
    try:
        for step in range(1 + options.rounds):
            state |= {"adapter": torch.full_like(state["adapter"], step), "step": step}
            for name, save in WAYS.items():
                path = folder / name / f"step-{step}"
                begin = time.perf_counter()
                save(state, path)
                seconds = time.perf_counter() - begin
                if step > 0:  # the first one writes all of it
                    best = min(seconds, results.get(name, {}).get("seconds", seconds))
                    results[name] = {"seconds": best, "bytes": new_bytes(path)}
                    shutil.rmtree(folder / name / f"step-{step - 2}", ignore_errors=True)
                os.sync()
    finally:
        shutil.rmtree(folder)
    changed = state["adapter"].nbytes
    print(f"{'':24} seconds    bytes  of what changed")
    for name, measured in results.items():
        share = measured["bytes"] / changed
        print(f"{name:24} {measured['seconds']:7.3f} {measured['bytes'] / 1e6:6.1f} MB {share:8.2f}")
    sizes = {"base_bytes": changed * NUM_BASE, "changed_bytes": changed, "rounds": options.rounds}
    print(write_results("reuse", sizes=sizes, results=results))


if __name__ == "__main__":
    main()
