"""The memory of a process and of its children, as the kernel counts it."""

import re
import subprocess
import time
from pathlib import Path


def highest_bytes(process: subprocess.Popen[str]) -> int:
    """Waits until a process has ended. Returns the most ``anonymous_bytes`` that were seen by then."""
    highest = 0
    while process.poll() is None:
        highest = max(highest, anonymous_bytes(process.pid))
        time.sleep(0.003)
    return highest


def anonymous_bytes(pid: int) -> int:
    """Of a process and those that it started, memory that they share counted once. 0 where one ends meanwhile: its part
    of what they share becomes the others', and would be counted twice.
    """
    total = 0
    try:
        members = living(pid)
        for member in members:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
            found = re.search(r"Pss_Anon:\s+(\d+) kB", rollup)
            total += 1024 * int(found[1]) if found else 0
        return total if living(pid) == members else 0
    except (FileNotFoundError, ProcessLookupError):
        return 0


def living(pid: int) -> list[int]:
    """The process and those of its children that still have memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in children if not Path(f"/proc/{child}/statm").read_text().startswith("0 "))]
