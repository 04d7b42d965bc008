"""The commands that read a whole checkpoint, as multiples of copying its files.

    python benchmarks/bench_offline.py --directory <on a disk>

The state is that of a training (weights and two moments of AdamW, fp32) of --gigabytes, saved as ranks of dp=2,tp=2
would. Each contender is a process of its own, timed from its start to its end, so that importing torch counts. They
take turns, round by round, and a ratio is one of minima. The limit is `cp -r` and an fsync of every file it wrote; ours
waits for the disk too. Stock's converter (dcp_to_torch, which does not) stands beside `convert --to torch`. Files are
in the page cache. Megabytes are the peak of resident memory, torch itself included. Writes
results/offline_<machine>.json.
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

import torchtitan_ext as tte
from torchtitan_ext.offline.reshard import reshard
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
        "convert --to hf": [*ours, "convert", str(source), str(target), "--to", "hf", "--prefix", "model"],
        "convert --to torch": [*ours, "convert", str(source), str(target), "--to", "torch"],
        "stock, dcp_to_torch": [
            sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(source), str(target)
        ],
        "diff": [*ours, "diff", str(source), str(source)],
        "verify --deep": [*ours, "verify", str(source), "--deep"],
        "import of DCP alone": [sys.executable, "-c", start],
    }  # fmt: skip


def run(command: list[str], target: Path) -> tuple[float, float]:
    """Seconds, and the peak of resident memory in MB."""
    os.sync()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    return seconds, usage.ru_maxrss * 1024 / 1e6


def measure(folder: Path, num_bytes: int, num_rounds: int) -> dict[str, Any]:
    source, target = folder / "source", folder / "target"
    write_source(source, num_bytes)
    commands = contenders(source, target)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    megabytes = dict.fromkeys(commands, 0.0)
    for _ in range(num_rounds):
        for name, command in commands.items():
            spent, peak = run(command, target)
            seconds[name].append(spent)
            megabytes[name] = max(megabytes[name], peak)
    shutil.rmtree(source)
    limit = min(seconds["cp and fsync"])
    return {
        name: {
            "seconds": round(min(spent), 2),
            "ratio": round(min(spent) / limit, 2),
            "megabytes": round(megabytes[name]),
        }
        for name, spent in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where checkpoints go; by default that of temporary files")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    with TemporaryDirectory(dir=arguments.directory) as folder:
        for gigabytes in arguments.gigabytes:
            rows = measure(Path(folder), int(gigabytes * 1e9), arguments.rounds)
            results[f"{gigabytes:g} GB"] = rows
            print(f"\n{gigabytes:g} GB")
            for name, row in rows.items():
                print(f"  {name:24} {row['seconds']:8.2f} s {row['ratio']:8.2f} {row['megabytes']:8} MB", flush=True)
    sizes = {"saved_mesh": SAVED_MESH, "hidden": HIDDEN, "rounds": arguments.rounds}
    print(f"\nwritten: benchmarks/results/{write_results('offline', sizes=sizes, results=results).name}")


if __name__ == "__main__":
    main()
