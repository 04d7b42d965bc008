"""Adds what ``make soak`` has run to the counts that are committed: a row per test file, by JUnit files of pytest.

    python benchmarks/soak_results.py build/soak.xml

A file may run in a portion of its own (make soak SOAK_TESTS=tests/transfer): rows of other files stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from result_file import RESULTS, describe_machine, write_results


def rows_of(junit: Path) -> dict[str, dict[str, object]]:
    """Of each test file how many tests passed, failed and were skipped, and how long they took in all."""
    counts: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts.setdefault(name, Counter())[outcome] += 1
        seconds[name] += float(case.get("time", 0))
    head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    about = {"factor": int(os.environ["TTE_SOAK"]), "seed": int(os.environ.get("TTE_SEED", 0))}
    return {
        name: {
            **{kind: count[kind] for kind in ("passed", "failed", "skipped")},
            "seconds": round(seconds[name]),
            **about,
        }
        | {"commit": head.stdout.strip()}
        for name, count in counts.items()
    }


def main() -> None:
    cpu = describe_machine()["cpu"]
    earlier = [json.loads(path.read_text()) for path in RESULTS.glob("soak_*.json")]
    rows = next((found["results"] for found in earlier if found["machine"]["cpu"] == cpu), {})
    for junit in sys.argv[1:]:
        rows |= rows_of(Path(junit))
    total = sum(row["passed"] for row in rows.values())
    print(write_results("soak", sizes={"files": len(rows), "passed": total}, results=dict(sorted(rows.items()))))


if __name__ == "__main__":
    main()
