"""The commands that read a whole checkpoint, as multiples of copying its files.

    python benchmarks/bench_offline.py --directory <on a disk>

The state is that of a training (weights and two moments of AdamW, fp32) of --gigabytes, saved as ranks of dp=2,tp=2
would. Each contender is a process of its own, timed from its start to its end, so that importing torch counts. They
take turns, round by round, and a ratio is one of minima. The limit is `cp -r` and an fsync of every file it wrote; ours
waits for the disk too. Files are in the page cache.

First: `inspect` of --keys tiny tensors, beside Python and typer alone. Writes results/offline_<machine>.json.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from result_file import write_results
from safetensors.torch import save_file

import torchtitan_ext as tte
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source

SAVED_MESH = {"dp": 2, "tp": 2}
HIDDEN = 1024
COPY = 'cp -r "$1" "$2" && sync "$2"/* && sync "$2"'


def training_state(num_bytes: int) -> dict[str, Any]:
    """Layers of a transformer, and two moments of each weight."""
    shapes = {"wq": (HIDDEN, HIDDEN), "wo": (HIDDEN, HIDDEN), "w1": (4 * HIDDEN, HIDDEN), "w2": (HIDDEN, 4 * HIDDEN)}
    layer_bytes = 3 * 4 * sum(rows * columns for rows, columns in shapes.values())
    layers = range(max(1, round(num_bytes / layer_bytes)))
    generator = torch.Generator().manual_seed(0)
    model = {
        f"layers.{layer}.{name}.weight": torch.randn(shape, generator=generator)
        for layer in layers
        for name, shape in shapes.items()
    }
    moments = {
        fqn: {kind: torch.randn(weight.shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq")}
        for fqn, weight in model.items()
    }
    return {"model": model, "optimizer": {"state": moments}, "step": 100}


def write_source(path: Path, num_bytes: int) -> None:
    whole = path.with_name("whole")
    tte.save(training_state(num_bytes), whole)
    reshard(open_source(whole), path, mesh=SAVED_MESH)
    shutil.rmtree(whole)


def contenders(source: Path, target: Path) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "torchtitan_ext"]
    start = "import torch.distributed.checkpoint"
    return {
        "cp and fsync": ["bash", "-c", COPY, "copy", str(source), str(target)],
        "reshard, the same mesh": [*ours, "reshard", str(source), str(target), "--mesh", "dp=2,tp=2"],
        "reshard to dp=4": [*ours, "reshard", str(source), str(target), "--mesh", "dp=4"],
        "reshard to dp=2,tp=4": [*ours, "reshard", str(source), str(target), "--mesh", "dp=2,tp=4"],
        "convert --to safetensors": [
            *ours, "convert", str(source), str(target), "--to", "safetensors", "--prefix", "model"
        ],
        "diff": [*ours, "diff", str(source), str(source)],
        "verify --deep": [*ours, "verify", str(source), "--deep"],
        "import of DCP alone": [sys.executable, "-c", start],
    }  # fmt: skip


def run(command: list[str], target: Path) -> float:
    """Seconds. What the command has written goes."""
    os.sync()
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    return seconds


def compare(commands: dict[str, list[str]], target: Path, limit: str, num_rounds: int) -> dict[str, Any]:
    """Seconds of each command, and the ratio to the limit's."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(num_rounds):
        for name, command in commands.items():
            seconds[name].append(run(command, target))
    least = min(seconds[limit])
    return {
        name: {"seconds": round(min(spent), 2), "ratio": round(min(spent) / least, 2)}
        for name, spent in seconds.items()
    }


def compare_copies(folder: Path, num_bytes: int, num_rounds: int) -> dict[str, Any]:
    source, target = folder / "source", folder / "target"
    write_source(source, num_bytes)
    rows = compare(contenders(source, target), target, "cp and fsync", num_rounds)
    shutil.rmtree(source)
    return rows


def compare_inspects(folder: Path, num_keys: int, num_rounds: int) -> dict[str, Any]:
    state = {f"layers.{number}.weight": torch.full((2,), float(number)) for number in range(num_keys)}
    tte.save(state, folder / "keys")
    save_file(state, folder / "keys.safetensors")
    inspect = [sys.executable, "-m", "torchtitan_ext", "inspect"]
    commands = {
        "Python and typer": [sys.executable, "-c", "import typer"],
        "inspect": [*inspect, str(folder / "keys")],
        "inspect of safetensors": [*inspect, str(folder / "keys.safetensors")],
    }
    rows = compare(commands, folder / "none", "Python and typer", num_rounds)
    shutil.rmtree(folder / "keys")
    return rows


def print_rows(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        print(f"  {name:24} {row['seconds']:8.2f} s {row['ratio']:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where checkpoints go; by default that of temporary files")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4], help="sizes of the state")
    parser.add_argument("--keys", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    with TemporaryDirectory(dir=arguments.directory) as folder:
        for num_keys in arguments.keys:
            results[f"{num_keys:,} keys"] = compare_inspects(Path(folder), num_keys, arguments.rounds)
            print_rows(f"{num_keys:,} keys", results[f"{num_keys:,} keys"])
        for gigabytes in arguments.gigabytes:
            results[f"{gigabytes:g} GB"] = compare_copies(Path(folder), int(gigabytes * 1e9), arguments.rounds)
            print_rows(f"{gigabytes:g} GB", results[f"{gigabytes:g} GB"])
    sizes = {"saved_mesh": SAVED_MESH, "hidden": HIDDEN, "rounds": arguments.rounds}
    print(f"\nwritten: benchmarks/results/{write_results('offline', sizes=sizes, results=results).name}")


if __name__ == "__main__":
    main()
