"""The tables of a result file of bench_hf.py or bench_data.py; those that decide something stand in docs/costs.md.

python benchmarks/contest_table.py benchmarks/results/hf_<machine>.json --into docs/costs.md
python benchmarks/contest_table.py benchmarks/results/data_<machine>.json --into docs/costs.md
"""

from collections.abc import Callable
from typing import Any

from result_page import command_without, print_or_put

Row = dict[str, Any]
Cases = dict[str, dict[str, Row]]


def table(
    title: str, cases: Cases, cell: Callable[[Row], str], more: dict[str, Callable[[dict[str, Row]], str]]
) -> str:
    """A row for each case, a column for each contender; ``more`` columns stand before these."""
    names = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    lines = [f"| {' | '.join([title, *more, *names])} |", "|---" * (1 + len(more) + len(names)) + "|"]
    for case, rows in cases.items():
        found = [cell(rows[name]) if name in rows else "-" for name in names]
        lines.append(f"| {' | '.join([case, *(column(rows) for column in more.values()), *found])} |")
    return "\n".join(lines)


def of_files(results: dict[str, Any]) -> str:
    """Ratios to the fastest raw way, and below them the most memory of each contender."""
    cases = {case: {name: row for name, row in rows.items() if not is_raw(name)} for case, rows in results.items()}
    fastest = {
        case: min(row["seconds"] for name, row in rows.items() if is_raw(name)) for case, rows in results.items()
    }
    steps: dict[str, Cases] = {}
    for case, rows in cases.items():
        steps.setdefault("save" if ", save" in case else "load", {})[case] = rows
    parts = []
    for step, of_step in steps.items():
        raw = {id(rows): f"{1e3 * fastest[case]:.0f} ms" for case, rows in of_step.items()}
        parts.append(
            table(f"{step}: multiples of raw", of_step, ratio_of, {"raw": lambda rows, raw=raw: raw[id(rows)]})
        )  # type: ignore[misc]
        names = dict.fromkeys(name for rows in of_step.values() for name in rows)
        most = {n: max(rows[n].get("megabytes", 0.0) for rows in of_step.values() if n in rows) for n in names}
        parts.append(
            "MB beside the state, at most: " + ", ".join(f"{name} {size:.0f}" for name, size in most.items()) + "."
        )
    return "\n\n".join(parts)


def is_raw(name: str) -> bool:
    return name.startswith("raw")


def ratio_of(row: Row) -> str:
    return "fails" if "failed" in row else f"{row['ratio']:.2f}"


def of_loaders(results: dict[str, Any]) -> str:
    """Samples per second as parts of the most, and longest waits; then starts and states."""
    rates = {case: rows for case, rows in results.items() if case not in ("starts", "states")}
    most: dict[str, Callable[[dict[str, Row]], str]] = {
        "most per second": lambda rows: f"{max(row.get('samples_per_second', 0) for row in rows.values()):,.0f}",
        "step": lambda rows: f"{next(row['step_ms'] for row in rows.values() if 'step_ms' in row):g} ms",
    }
    parts = [table("part of the most samples per second, longest wait", rates, rate_and_wait, most)]
    lines = ["| until the first batch | ms | MB |", "|---|---|---|"]
    lines += [f"| {case} | {row['ms']:g} | {row['megabytes']:g} |" for case, row in results["starts"].items()]
    parts.append("\n".join(lines))
    lines = ["| `state_dict()` | ms |", "|---|---|"]
    lines += [f"| {case} | {row.get('ms', 'fails')} |" for case, row in results["states"].items()]
    return "\n\n".join([*parts, "\n".join(lines)])


def of_synced_files(results: dict[str, Any]) -> str:
    """On one and four processes, without the saves that nobody should trust."""
    return of_files({case: rows for case, rows in results.items() if "without fsync" not in case and case[0] != "2"})


def of_rates(results: dict[str, Any]) -> str:
    """On two processes, without starts and states."""
    return of_loaders({case: rows for case, rows in results.items() if case[0] != "1"}).split("\n\n")[0]


def rate_and_wait(row: Row) -> str:
    if "failed" in row:
        return "fails"
    wait = row["longest_wait_ms"]
    return f"{row['ratio']:.2f}, {'-' if wait is None else f'{wait:g} ms'}"


TABLES = {"hf": of_files, "data": of_loaders}
ON_PAGE = {"hf": of_synced_files, "data": of_rates}


def head(content: dict[str, Any]) -> str:
    """What was run, and where."""
    command = command_without(content, "--directory")
    machine, versions = content["machine"], {**content["versions"], **content["sizes"].get("libraries", {})}
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "torchtitan-ext")
    cores = f"{machine['cores']} cores, load {machine['load_average']}"
    return f"`{command}`; {machine['cpu']}, {cores}, {known}, {content['date']}."


if __name__ == "__main__":
    print_or_put(
        __doc__,
        head,
        lambda content: TABLES[content["benchmark"]](content["results"]),
        on_page=lambda content: ON_PAGE[content["benchmark"]](content["results"]),
    )
