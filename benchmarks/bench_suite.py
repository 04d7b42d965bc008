"""Where the time of the test suite goes: seconds and CPU seconds of each file, as `make test` runs them.

    python benchmarks/bench_suite.py [--name sampled] [-- ARGUMENTS OF PYTEST]

Prints the files that take most, writes results/suite_<name>_<machine>.json. A file's seconds are those in which its
process of pytest-xdist ran nothing else; CPU seconds are of that process and all below it. How fast the machine was
says the time that a process takes to import torch, before and after: CPU seconds of one machine differ by two thirds
from day to day.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="sampled", help="what was run: sampled, full")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "file_seconds", "-n", str(options.processes)]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "files.jsonl")
        speed = [seconds_to_import_torch()]
        start = time.monotonic()
        code = subprocess.call([*command, "--dist", "loadfile", "--file-seconds", str(lines), *options.arguments])
        seconds = time.monotonic() - start
        speed.append(seconds_to_import_torch())
        files: list[dict[str, Any]] = [json.loads(line) for line in lines.read_text().splitlines()]
    files.sort(key=lambda one: -one["cpu_seconds"])
    total = {"seconds": round(seconds), "cpu_seconds": round(sum(one["cpu_seconds"] for one in files))}
    total |= {"tests": sum(one["tests"] for one in files), "exit_code": code}
    total |= {"import_torch_cpu_seconds": speed}
    print(total)
    for one in files[:40]:
        print(f"{one['cpu_seconds']:8.1f} s CPU {one['seconds']:8.1f} s {one['tests']:6} tests  {one['file']}")
    rounded = {one.pop("file"): {name: round(value, 1) for name, value in one.items()} for one in files}
    results = {"all": total, **rounded}
    print(write_results(f"suite_{options.name}", sizes={"processes": options.processes}, results=results))


def seconds_to_import_torch() -> float:
    """CPU seconds of a fresh process, the least of three."""
    program = "import time, torch; print(time.process_time())"
    command = [sys.executable, "-c", program]
    return min(round(float(subprocess.check_output(command, text=True)), 2) for _ in range(3))


if __name__ == "__main__":
    main()
