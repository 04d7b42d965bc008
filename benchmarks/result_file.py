"""Benchmark results as committed files: what was measured, on which machine, with which versions and command."""

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def measure_seconds(function: Callable[[], object], *, num_repeats: int, num_calls: int = 1) -> float:
    """Median over `num_repeats` of the wall time of one call, each the mean of `num_calls` calls; one warm-up call."""
    function()
    durations = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for _ in range(num_calls):
            function()
        durations.append((time.perf_counter() - start) / num_calls)
    return statistics.median(durations)


def status_bytes(field: str) -> int:
    """Of this process, by the kernel: ``VmRSS``, what is resident, or ``VmHWM``, the peak of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def describe_machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    return {
        "cpu": model.group(1).strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def write_results(name: str, *, sizes: dict[str, Any], results: dict[str, Any]) -> Path:
    """Writes `results/<name>_<machine>.json` over an older one of the same machine; returns its path."""
    machine = describe_machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")
    content = {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "torchtitan-ext": version("torchtitan-ext"),
        },
        "sizes": sizes,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{slug}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
