"""The table of a result file of bench_resume.py, as it stands in README.

python benchmarks/resume_table.py benchmarks/results/resume_<machine>.json --into README.md
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table of resume_table.py -->", "<!-- end of table -->"


def table(results: dict[str, Any]) -> str:
    """Seconds of ours and stock for each phase and restart, and at the end the CPU seconds of all ranks."""
    lines = [f"| seconds, `tte.load` / `dcp.load` | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    phases = list(next(iter(results.values())))
    for phase in phases:
        lines.append(row(phase, [rows[phase]["seconds"] for rows in results.values()], digits=2))
    for phase in phases[-2:]:
        lines.append(row(f"{phase}, CPU of all ranks", [rows[phase]["CPU seconds"] for rows in results.values()], 1))
    return "\n".join(lines)


def row(title: str, cells: list[dict[str, float]], digits: int) -> str:
    texts = [f"{cell['ours']:.{digits}f} / {cell['stock']:.{digits}f}" for cell in cells]
    return f"| {title} | {' | '.join(texts)} |"


def put_into(page: str, content: dict[str, Any]) -> str:
    """A page with the table of a result file between its two markers.

    Raises:
        ValueError: The page has no place for it.
    """
    sizes = content["sizes"]
    command = re.sub(r" --folder \S+", "", content["command"])
    head = (
        f"`{command}`; {content['machine']['cpu']}, {content['machine']['cores']} cores, load before it "
        f"{sizes['load_before']}, torch {content['versions']['torch']}, Python {content['versions']['python']}, "
        f"{content['date']}; checkpoints of {sizes['checkpoint_bytes'] / 1e6:.0f} MB, medians of {sizes['rounds']} "
        "round(s)."
    )
    place = re.compile(rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.S)
    if not place.search(page):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return place.sub(lambda match: f"{match[1]}{head}\n\n{table(content['results'])}\n{match[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, help="a page with markers for the table")
    options = parser.parse_args()
    content = json.loads(options.results.read_text())
    if options.into is None:
        print(table(content["results"]))
    else:
        options.into.write_text(put_into(options.into.read_text(), content))


if __name__ == "__main__":
    main()
