"""Tables of a result file of bench_storage.py; rows of the last one stand in docs/costs.md.

python benchmarks/storage_table.py benchmarks/results/storage_<machine>.json [--into docs/costs.md]
"""

from collections.abc import Callable
from typing import Any

from result_page import command_without, print_or_put

Row = dict[str, Any]
Results = dict[str, dict[str, Row]]
# By step and state, of each number of processes.
Steps = dict[str, dict[str, dict[str, dict[str, Row]]]]

# Measured of every state, beside DCP; the rest is in the table of peers.
OURS = ("ours, files only", "ours, tte.", "ours, dcp.")

ON_PAGE = ("tte.save", "tte.load", "tte.load of DCP's files")
"""Of ours; of others all but variants of DCP."""


def tables(results: Results) -> str:
    steps = by_step(results)
    return "\n\n".join([*(ours_and_dcp(step, states) for step, states in steps.items()), peers(steps)])


def by_step(results: Results) -> Steps:
    steps: Steps = {}
    for case, rows in results.items():
        processes, rest = case.split(", ", 1)
        state, step = rest.rsplit(", ", 1)
        steps.setdefault(step, {}).setdefault(state, {})[processes.split()[0]] = rows
    return steps


def ours_and_dcp(step: str, states: dict[str, dict[str, dict[str, Row]]]) -> str:
    """A row for each state and number of processes: the fastest raw way in milliseconds, and ratios to it."""
    every = [rows for worlds in states.values() for rows in worlds.values()]
    names = [name for name in every[0] if name == "DCP" or name.startswith(OURS)]
    names = [name for name in names if all(name in rows for rows in every)]
    lines = [f"| {step} | raw | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for state, worlds in states.items():
        for world_size, rows in worlds.items():
            cells = [ratio(rows[name]) for name in names]
            lines.append(f"| {state}, {world_size} | {limit(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def is_on_page(name: str) -> bool:
    return name.removeprefix("ours, ") in ON_PAGE or not name.startswith(("raw", "ours", "DCP, "))


def peers(steps: Steps, is_shown: Callable[[str], bool] = lambda name: True) -> str:
    """A row for each contender, of the first state: ratios by number of processes, and the most memory of any step."""
    first = {step: next(iter(states.values())) for step, states in steps.items()}
    every = dict.fromkeys(name for worlds in first.values() for rows in worlds.values() for name in rows)
    names = sorted(filter(is_shown, every), key=lambda name: (not name.startswith("raw"), not name.startswith("ours")))
    state = next(iter(next(iter(steps.values()))))
    titles = [f"{step} ({' / '.join(worlds)})" for step, worlds in first.items()]
    lines = [f"| {state} | " + " | ".join(titles) + " | MB |", "|---" * (len(titles) + 2) + "|"]
    for name in names:
        found = [[rows.get(name) for rows in worlds.values()] for worlds in first.values()]
        cells = [" / ".join(ratio(row) for row in rows) if any(rows) else "" for rows in found]
        most = max(row.get("megabytes", 0.0) for rows in found for row in rows if row)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {most:.0f} |")
    return "\n".join(lines)


def limit(rows: dict[str, Row]) -> str:
    return f"{1e3 * min(row['seconds'] for name, row in rows.items() if name.startswith('raw')):.0f} ms"


def ratio(row: Row | None) -> str:
    if row is None:
        return "-"
    return "fails" if "failed" in row else f"{row['ratio']:.2f}"


def head(content: dict[str, Any]) -> str:
    """What was run, and where."""
    sizes = content["sizes"]
    command = command_without(content, "--directory")
    return (
        f"`{command}`; {content['machine']['cpu']}, {content['machine']['cores']} cores, "
        f"load {content['machine']['load_average']}, {sizes['file_system']}, torch {content['versions']['torch']}, "
        f"Python {content['versions']['python']}, {content['date']}."
    )


if __name__ == "__main__":
    print_or_put(
        __doc__,
        head,
        lambda content: tables(content["results"]),
        on_page=lambda content: peers(by_step(content["results"]), is_on_page),
    )
