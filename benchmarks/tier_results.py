"""Counts of the tiers that a commit does not run, by JUnit files of pytest, and how old those of the nightly tier are.

    python benchmarks/tier_results.py soak build/soak.xml
    python benchmarks/tier_results.py nightly build/nightly.xml --part lost
    python benchmarks/tier_results.py age

The soak has a row per test file: a file may run in a portion of its own (make soak SOAK_TESTS=tests/transfer), and rows
of other files stay. A part of the nightly tier runs as a whole, and has a file of results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from result_file import RESULTS, describe_machine, write_results

TIERS = Path(__file__).resolve().parents[1] / "tests" / "harness"
sys.path.append(str(TIERS))

OLD, TOO_OLD = 80, 150
"""So many commits after the last results of a part `.ci/run` warns, and fails."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["soak", "nightly", "age"])
    parser.add_argument("junit", nargs="?", type=Path)
    parser.add_argument("--part", default="")
    options = parser.parse_args()
    if options.what == "age":
        sys.exit(check_age())
    if not options.junit.exists():
        sys.exit(f"{options.junit} is not there: the tests did not begin, and no results are written")
    rows = rows_of(options.junit)
    if options.what == "soak":
        about = {"factor": int(os.environ["TTE_SOAK"]), "seed": int(os.environ.get("TTE_SEED", 0)), "commit": commit()}
        cpu = describe_machine()["cpu"]
        earlier = [json.loads(path.read_text()) for path in RESULTS.glob("soak_*.json")]
        kept = next((found["results"] for found in earlier if found["machine"]["cpu"] == cpu), {})
        rows = dict(sorted((kept | {name: row | about for name, row in rows.items()}).items()))
        print(write_results("soak", sizes={"files": len(rows), "passed": total(rows, "passed")}, results=rows))
    else:
        counts = {kind: total(rows, kind) for kind in ("passed", "failed", "skipped", "seconds")}
        results = counts | {"failures": failures_of(options.junit), "seed": int(os.environ.get("TTE_SEED", 0))}
        path = write_results("nightly", sizes={"files": len(rows)}, results=results | {"commit": commit()})
        print(path.rename(RESULTS / f"nightly_{options.part}.json"), counts)


def rows_of(junit: Path) -> dict[str, dict[str, Any]]:
    """Of each test file how many tests passed, failed and were skipped, and how long they took in all."""
    counts: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py"
        counts.setdefault(name, Counter())[outcome_of(case)] += 1
        seconds[name] += float(case.get("time", 0))
    return {
        name: {kind: count[kind] for kind in ("passed", "failed", "skipped")} | {"seconds": round(seconds[name])}
        for name, count in counts.items()
    }


def outcome_of(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def failures_of(junit: Path) -> list[str]:
    cases = ElementTree.parse(junit).iter("testcase")
    return [f"{case.get('classname')}::{case.get('name')}" for case in cases if outcome_of(case) == "failed"]


def total(rows: dict[str, dict[str, Any]], kind: str) -> int:
    return sum(row[kind] for row in rows.values())


def commit() -> str:
    return git("describe", "--always", "--dirty")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def check_age() -> int:
    """The exit code: 1 where a part has results of too many commits ago, or none since the parts are there."""
    from tier import PARTS

    code = 0
    try:
        first = git("log", "--diff-filter=A", "--format=%H", "--", str(TIERS / "tier.py")).splitlines()[-1]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        print(f"how old the results of `make nightly` are cannot be told here: {error}", file=sys.stderr)
        return 0
    for part in PARTS:
        path = RESULTS / f"nightly_{part}.json"
        last = git("log", "-1", "--format=%H", "--", str(path))
        age = int(git("rev-list", "--count", f"{last or first}..HEAD"))
        if age > OLD or not last:
            when = f"{age} commits ago" if last else f"never in {age} commits"
            limit = f"; it must run once in {TOO_OLD}" if age > TOO_OLD else ""
            print(f"make nightly PART={part}: results were committed {when}{limit}", file=sys.stderr)
            code |= age > TOO_OLD
    return code


if __name__ == "__main__":
    main()
