"""The table of a result file of bench_resume.py; some of its rows stand in docs/costs.md.

python benchmarks/resume_table.py benchmarks/results/resume_<machine>.json [--into docs/costs.md]
"""

from collections.abc import Sequence
from typing import Any

from result_page import command_without, print_or_put

ON_PAGE = ("plan", "read", "checkpointing", "whole")
"""Of the phases that this package changes, and the whole."""


def table(results: dict[str, Any], chosen: Sequence[str] = ()) -> str:
    """Seconds of ours and stock for each phase, or the chosen ones, and restart; then the CPU seconds of all ranks."""
    lines = [f"| seconds, `tte.load` / `dcp.load` | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    phases = list(next(iter(results.values())))
    for phase in chosen or phases:
        lines.append(row(phase, [rows[phase]["seconds"] for rows in results.values()], digits=2))
    for phase in phases[-2:]:
        lines.append(row(f"{phase}, CPU of all ranks", [rows[phase]["CPU seconds"] for rows in results.values()], 1))
    return "\n".join(lines)


def row(title: str, cells: list[dict[str, float]], digits: int) -> str:
    texts = [f"{cell['ours']:.{digits}f} / {cell['stock']:.{digits}f}" for cell in cells]
    return f"| {title} | {' | '.join(texts)} |"


def head(content: dict[str, Any]) -> str:
    """What was run, and where."""
    sizes = content["sizes"]
    command = command_without(content, "--folder")
    return (
        f"`{command}`; {content['machine']['cpu']}, {content['machine']['cores']} cores, load before it "
        f"{sizes['load_before']}, torch {content['versions']['torch']}, Python {content['versions']['python']}, "
        f"{content['date']}; checkpoints of {sizes['checkpoint_bytes'] / 1e6:.0f} MB, medians of {sizes['rounds']} "
        "round(s)."
    )


if __name__ == "__main__":
    print_or_put(
        __doc__,
        head,
        lambda content: table(content["results"]),
        on_page=lambda content: table(content["results"], ON_PAGE),
    )
