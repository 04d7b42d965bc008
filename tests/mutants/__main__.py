"""Makes wrong changes, one after the other, and says which of them no test finds.

    PYTHONPATH=tests python -m mutants run --part hand-python [--from 0 --to 10] [--minutes 20] [--again survivors]

A run goes on where an earlier one ended, and adds to ``benchmarks/results/mutants_<part>.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Collection, Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

from mutants.generate import NUM_EACH, SEED, changed, drawn
from mutants.judges import ROOT, judges_of
from mutants.scratch import Scratch
from mutants.wrong_changes import WRONG_CHANGES

PARTS = ("hand-python", "hand-cpp", "generated-python", "generated-cpp")


class Mutant(NamedTuple):
    """A file with a wrong change, and what should find it."""

    name: str
    kind: str
    file: str
    line: int
    text: str
    judges: tuple[str, ...]


def by_hand(language: str) -> list[list[Mutant]]:
    """Lists of one, as of ``generated``."""
    found = []
    for one in WRONG_CHANGES:
        if one.file.startswith("csrc/") == (language == "cpp"):
            text = (ROOT / one.file).read_text()
            line = text[: text.index(one.old)].count("\n") + 1
            found.append([Mutant(one.name, one.tier, one.file, line, text.replace(one.old, one.new), one.judges)])
    return found


def generated(language: str, number: int) -> Iterator[Mutant]:
    """The mutants for one place, of which the first that compiles counts."""
    for edit in drawn(language, number):
        before = (ROOT / edit.file).read_text()
        line, old = before[: edit.begin].count("\n") + 1, " ".join(before[edit.begin : edit.end].split())
        name = f"{number}: {edit.file}:{line}: {old[:60]} -> {edit.new[:60]}"
        yield Mutant(name, edit.kind, edit.file, line, changed(edit), judges_of(edit.file))


def judged(scratch: Scratch, mutant: Mutant) -> dict[str, Any] | None:
    """The row of a mutant; ``None`` if it does not compile."""
    is_cpp = mutant.file.startswith("csrc/")
    if not is_cpp:
        try:
            compile(mutant.text, mutant.file, "exec")
        except SyntaxError:
            return None
    begin, failed = time.monotonic(), list[str]()
    for judge in mutant.judges:
        with scratch.changed(mutant.file, mutant.text):
            if is_cpp and not scratch.build(judge):
                return None
            failed = scratch.judge(judge)
        if failed:
            break
    row = {"name": mutant.name, "kind": mutant.kind, "file": mutant.file, "line": mutant.line}
    seconds = round(time.monotonic() - begin)
    return {**row, "result": "killed" if failed else "survived", "by": "".join(failed[:1]), "seconds": seconds}


def check_judges(scratch: Scratch, rows: Collection[dict[str, Any]], *, is_cpp: bool) -> None:
    """A test that fails without a change, too, has killed nothing."""
    unchecked = [row for row in rows if row["result"] == "killed" and not row.get("passes_without")]
    tests = sorted({_without_case(row["by"]) for row in unchecked})
    if is_cpp and any("/" in test for test in tests):
        scratch.build(next(test for test in tests if "/" in test))
    unfair = set(map(_without_case, scratch.unfair(tests)))
    for row in unchecked:
        row["passes_without"] = _without_case(row["by"]) not in unfair
        if not row["passes_without"]:
            row["result"] = "survived"
            print(f"{row['by']} fails without a wrong change, too: it judges nothing")


def _without_case(test: str) -> str:
    return test.removesuffix(" hangs").partition("[")[0]


def run(part: str, first: int, last: int, minutes: float, again: str | None) -> None:
    origin, language = part.split("-")
    places: list[Any] = by_hand(language) if origin == "hand" else [generated(language, one) for one in range(NUM_EACH)]
    path = ROOT / "benchmarks" / "results" / f"mutants_{part.replace('-', '_')}.json"
    rows: dict[int, dict[str, Any]] = {}
    if path.exists() and again != "all":
        rows = {row["number"]: row for row in json.loads(path.read_text())["mutants"]}
    anew = {number for number, row in rows.items() if again == "survivors" and row["result"] == "survived"}
    head = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    scratch, end = Scratch(), time.monotonic() + 60 * minutes
    for number in range(first, min(last, len(places))):
        if number in rows and number not in anew:
            continue
        if time.monotonic() > end:
            print(f"{minutes} minutes have passed: call it again to go on")
            break
        row = next(row for mutant in places[number] if (row := judged(scratch, mutant)) is not None)
        rows[number] = {"number": number, **row, "commit": head.stdout.strip()}
        print(f"{row['result']}: {row['name']} {row['by'] and 'by ' + row['by']} ({row['seconds']} s)", flush=True)
        write(path, part, rows, len(places))
    check_judges(scratch, rows.values(), is_cpp=language == "cpp")
    write(path, part, rows, len(places))
    survivors = [row for row in rows.values() if row["result"] == "survived"]
    print(f"{part}: {len(rows)} of {len(places)} judged, {len(rows) - len(survivors)} killed; no test finds")
    for row in survivors:
        print(f"  {row['name']} ({row['file']}:{row['line']})")


def write(path: Any, part: str, rows: dict[int, dict[str, Any]], num_mutants: int) -> None:
    ordered = [rows[number] for number in sorted(rows)]
    num_killed = sum(row["result"] == "killed" for row in ordered)
    content = {
        "benchmark": path.stem,
        "command": f"make mutants PART={part}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "seed": SEED if part.startswith("generated") else None,
        "mutants_in_all": num_mutants,
        "judged": len(ordered),
        "killed": num_killed,
        "kill_rate": round(num_killed / max(1, len(ordered)), 3),
        "mutants": ordered,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description="Says which wrong changes no test finds.")
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--to", dest="last", type=int, default=1000, help="one past the last")
    parser.add_argument("--minutes", type=float, default=20, help="no mutant is begun later")
    parser.add_argument("--again", choices=["survivors", "all"], help="judge these anew that earlier runs have judged")
    given = parser.parse_args()
    run(given.part, given.first, given.last, given.minutes, given.again)


if __name__ == "__main__":
    main()
