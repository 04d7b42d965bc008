"""What a proof costs: of a load beside ``tte.fingerprint`` of the same state, and fingerprints of a save beside none.

    python benchmarks/bench_proof.py [--megabytes 1024] [--rounds 7] [--folder PATH]

One process, threads of torch and of the storage as they are by default. The state is of a transformer: large matrices
and many small tensors, float32. Each round times all contenders, one after the other; ratios are of medians. Prints a
table, writes results/proof_<machine>.json.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import write_results

import torchtitan_ext as tte
from torchtitan_ext.metrics import MetricsHandler


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Layers of four square matrices of 4 MiB and twelve vectors."""
    torch.manual_seed(0)
    state = {}
    for layer in range(max(1, megabytes // 16)):
        for name in ("wq", "wk", "wv", "wo"):
            state[f"layers.{layer}.{name}"] = torch.randn(1024, 1024)
        for number in range(12):
            state[f"layers.{layer}.norm_{number}"] = torch.randn(1024)
    return state


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Medians of the seconds of each contender."""
    state = state_of(megabytes)
    proof_seconds: list[float] = []
    taken: dict[str, list[float]] = defaultdict(list)
    handler = MetricsHandler(lambda metrics: proof_seconds.append(metrics["phase_seconds"].get("prove", 0.0)))
    logger = logging.getLogger("torchtitan_ext")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        for number in range(rounds + 1):
            saves: dict[str, Callable[[], Any]] = {
                "save": lambda: tte.save(state, folder / "plain"),
                "save with fingerprints": lambda: tte.save(state, folder / "proven", fingerprints=True),
            }
            found = {}
            for name, save in saves.items():
                shutil.rmtree(folder, ignore_errors=True)
                found[name] = seconds_of(save)
            found["fingerprint"] = seconds_of(lambda: tte.fingerprint(state))
            found["load"] = seconds_of(lambda: tte.load(state, folder / "proven"))
            found["load with proof"] = seconds_of(lambda: tte.load(state, folder / "proven", prove=True))
            found["proof alone"] = proof_seconds[-1]
            for name, seconds in found.items() if number > 0 else ():  # the first round warms up
                taken[name].append(seconds)
    finally:
        logger.removeHandler(handler)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        medians = measure(arguments.megabytes, arguments.rounds, Path(folder) / "run")
    ratios = {
        "proof / fingerprint": medians["proof alone"] / medians["fingerprint"],
        "load with proof / load and fingerprint": medians["load with proof"]
        / (medians["load"] + medians["fingerprint"]),
        "save with fingerprints / save": medians["save with fingerprints"] / medians["save"],
    }
    for name, seconds in medians.items():
        print(f"{name:42} {seconds:8.3f} s")
    for name, ratio in ratios.items():
        print(f"{name:42} {ratio:8.3f}")
    case = {"megabytes": arguments.megabytes, "rounds": arguments.rounds}
    write_results("proof", sizes=case, results={"median_seconds": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
