"""From the start of torchrun to the end of the first training step after a restart on 8 -> 4 -> 8 ranks, by phase.

    python benchmarks/bench_resume.py [--rounds 3] [--folder PATH]

A model of 29 million parameters with AdamW on FSDP2 x TP 2 over gloo (``resume_job.py``), saved by 8 ranks and resumed
by 4, saved by these and resumed by 8; by ``tte.load`` with data loader, LR scheduler and counters, and by ``dcp.load``
with the LR scheduler and a count. Every restart is a fresh torchrun with fresh interpreters. Cold: the files of the
checkpoint were dropped from the page cache. A phase ends when the last rank has passed it, so the phases of a restart
add up to its time. CPU seconds are those of all ranks together: other load on the machine hardly changes them. The
contenders take turns; numbers are medians over the rounds. A restart before the first round compares what was loaded
with what was saved. Prints a table, writes results/resume_<machine>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raw_files import drop_from_cache, files_of
from result_file import write_results

JOB = Path(__file__).with_name("resume_job.py")
CONTENDERS = ("ours", "stock")
RESTARTS = {"8 -> 4": (4, "step-1"), "4 -> 8": (8, "step-2")}

# The phases of a load and of what it needs, which differ between contenders; the others run the same code.
OF_CHECKPOINTING = ("import checkpointing", "plan", "read", "components")


# Installed packages have their byte code beside them.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

Seconds = dict[str, tuple[float, float]]
"""Of each phase how long it took, and for how long all ranks together computed."""


class Launch:
    """One torchrun of the job: the seconds of each phase, and what the ranks noted."""

    def __init__(self, contender: str, num_ranks: int, *options: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        with tempfile.TemporaryDirectory() as notes:
            begin = time.monotonic()
            subprocess.run([*launcher, str(JOB), contender, "--notes", notes, *options], check=True, env=ENVIRONMENT)
            ranks = [json.loads(path.read_text()) for path in sorted(Path(notes).iterdir())]
        self.loaded, self.saved = ranks[0]["loaded"], ranks[0]["saved"]
        self.seconds: Seconds = {}
        last, last_computed = begin, 0.0
        for of_ranks in zip(*(rank["passed"] for rank in ranks), strict=True):
            (phase,) = {name for name, _, _ in of_ranks}
            moment, computed = max(moment for _, moment, _ in of_ranks), sum(seconds for _, _, seconds in of_ranks)
            self.seconds[phase] = moment - last, computed - last_computed
            last, last_computed = moment, computed


def prepare(contender: str, run: Path) -> None:
    """The checkpoints of 8 ranks and of the 4 that went on; each is loaded once and compared with what was saved."""
    first = Launch(contender, 8, "--save", str(run / "step-1"))
    second = Launch(contender, 4, "--load", str(run / "step-1"), "--save", str(run / "step-2"), "--check")
    third = Launch(contender, 8, "--load", str(run / "step-2"), "--check")
    if (second.loaded, third.loaded) != (first.saved, second.saved) or not first.saved:
        raise ValueError(f"{contender} has loaded other values than it saved")


def restart(contender: str, run: Path, name: str, *, cold: bool) -> Seconds:
    num_ranks, step = RESTARTS[name]
    files = files_of(run / step, 0, 1)
    if cold:
        drop_from_cache(files)
    else:
        for file in files:
            file.read_bytes()
    return Launch(contender, num_ranks, "--load", str(run / step)).seconds


def summary(rounds: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Medians of each contender, and ours by stock's."""
    phases = {phase: (phase,) for phase in rounds["ours"][0]}
    phases |= {"checkpointing": OF_CHECKPOINTING, "whole": tuple(phases)}
    rows: dict[str, Any] = {}
    for title, parts in phases.items():
        rows[title] = {}
        for number, unit in enumerate(("seconds", "CPU seconds")):
            found = {
                contender: statistics.median(sum(one[part][number] for part in parts) for one in rounds[contender])
                for contender in CONTENDERS
            }
            rounded = {contender: round(value, 3) for contender, value in found.items()}
            rows[title][unit] = {**rounded, "ratio": round(found["ours"] / found["stock"], 2)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    load_before, begin = round(os.getloadavg()[0], 1), time.monotonic()
    cases = [(name, cold) for name in RESTARTS for cold in (False, True)]
    seconds: dict[str, dict[str, list[Seconds]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for contender in CONTENDERS:
            prepare(contender, Path(folder, contender))
        num_bytes = sum(file.stat().st_size for file in files_of(Path(folder, "ours", "step-1"), 0, 1))
        for number in range(arguments.rounds):
            for name, cold in cases:
                for contender in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
                    found = restart(contender, Path(folder, contender), name, cold=cold)
                    of_case = seconds.setdefault(f"{name}, {'cold' if cold else 'warm'}", {})
                    of_case.setdefault(contender, []).append(found)
    results = {case: summary(rounds) for case, rounds in seconds.items()}
    for case, rows in results.items():
        print(f"\n{case:23} seconds: ours   stock  ratio    CPU: ours   stock  ratio")
        for phase, row in rows.items():
            columns = (f"{of['ours']:12.2f} {of['stock']:7.2f} {of['ratio']:6.2f}" for of in row.values())
            print(f"  {phase:22}", *columns)
    sizes = {
        "rounds": arguments.rounds,
        "checkpoint_bytes": num_bytes,
        "load_before": load_before,
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    print(f"\nwrote {write_results('resume', sizes=sizes, results=results)}")


if __name__ == "__main__":
    main()
