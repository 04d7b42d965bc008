"""Planning of saves and loads of Llama with AdamW on many ranks: ours against stock DCP.

    python benchmarks/bench_plan.py                  all cases: a table, and results/plan_<machine>.json
    python benchmarks/bench_plan.py --ranks 1024 --model 405B --json case.json
    python benchmarks/bench_plan.py --digests        what a save reads of tensors that may be on several meshes

Ranks are simulated in one process. What each rank would send is made first and pickled, as DCP's gather does. Timed, in
CPU seconds and at the best of a few rounds, is what the coordinator then does with it: unpickling ("gather"), planning,
and pickling each rank's answer ("scatter"); and what one rank does of it, before the gather and after the scatter.
Bytes gathered are the longest message times the ranks, because DCP pads. Stock gets the same states. It is run for up
to --stock-ranks ranks; beyond, the coordinator's seconds and bytes grow in proportion to ranks, and are marked as
extrapolated ("~"). Loads are on twice as many ranks as the save where the state can be had there, and on half of them.

"finish" is what the coordinator makes of the ranks' write results, the making of `.metadata` included, which is
measured alone too. Beside the models (plan_cases.py) there are one tensor of 10,000 chunks, 50,000 small tensors, 200
keys of its own on each of 1,024 ranks, and a tiny state.
"""

import argparse
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plan_cases import MODELS, NUM_STAGES, TP, Case, ManyChunks, OwnKeys, SmallTensors, Tiny, Training
from plan_measures import (
    Clock,
    Measured,
    a_rank_of,
    measure_finish,
    measure_our_load,
    measure_our_save,
    measure_rank_load,
    measure_rank_save,
    measure_stock_load,
    measure_stock_save,
    with_places,
)
from result_file import measure_seconds, write_results
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.state.value_digest import digest_large

WORLD_SIZES = [8, 64, 256, 1024, 8192]
PHASES = ["save", "load"]
# Write results have an entry per shard and rank.
MAX_WRITE_RESULTS = 300_000
# The cases of which a rank of stock is measured too: 405B on 1,024 ranks takes it half a minute.
STOCK_RANKS = ["8B", "70B", "405B", "405B pp"]
MOST_STOCK_RANKS = 1024
# Layouts of several meshes need a node per pipeline stage.
MIN_RANKS = NUM_STAGES * TP


def run_case(case: Case, stock_ranks: int, clock: Clock, *, is_stock_rank_run: bool = True) -> dict[str, Any]:
    """All figures of one case; those of a rank of stock, which goes through all chunks of all keys, on demand."""
    ours, metadata, answer = measure_ours(case, clock)
    ranks, stock_plan = measure_ranks(case, metadata, answer, clock, is_stock_rank_run=is_stock_rank_run)
    stock, factor = measure_stock(case, stock_plan, stock_ranks, clock)
    rows: dict[str, Any] = {}
    for phase, found in ours.items():
        rows[phase] = {"ours_seconds": found.plan_seconds, **found.row(), **ranks.get(phase, {}), "stock_seconds": None}
        if phase in stock:
            scaled = stock[phase].times(factor)
            rows[phase] |= {f"stock_{name}": value for name, value in scaled.row().items()}
            rows[phase] |= {"stock_seconds": scaled.plan_seconds, "is_stock_extrapolated": factor > 1}
    num_results = len(case.table(0).entries) * case.num_ranks
    finish = None if num_results > MAX_WRITE_RESULTS else measure_finish(case, metadata, clock)
    return {
        "case": {"kind": type(case).__name__, **vars(case)},
        "is_collector_on": clock.is_collecting,
        "num_keys": len(metadata.state_dict_metadata),
        **rows,
        "finish": finish,
        "rank_load_seconds": ranks["load"]["rank_seconds"],
        "stock_rank_load_seconds": ranks["load"]["stock_rank_seconds"],
    }


def measure_ours(case: Case, clock: Clock) -> tuple[dict[str, Measured], Metadata, SavePlan]:
    """Our coordinator's figures, the metadata, and the answer to one rank."""
    ours = {"save": measure_our_save(case, clock)}
    plans, metadata = ours["save"].result
    answer = plans[a_rank_of(case)]
    loads = {"load": case}
    if isinstance(case, Training):
        loads["load"] = replace(case, num_ranks=2 * case.num_ranks)
        if MIN_RANKS < case.num_ranks <= 1024:
            loads["load_half"] = replace(case, num_ranks=case.num_ranks // 2)
    for measured in ours.values():
        measured.result = None
    for phase, loading in loads.items():
        ours[phase] = measure_our_load(loading, metadata, clock)
        ours[phase].result = None
    return ours, metadata, answer


def measure_ranks(
    case: Case, metadata: Metadata, answer: SavePlan, clock: Clock, *, is_stock_rank_run: bool
) -> tuple[dict[str, dict[str, float | None]], LoadPlan | None]:
    """Seconds of one rank by phase, ours and stock's; and what a rank of stock sends to load."""
    rank = a_rank_of(case)
    state = case.state(rank)
    ours = [measure_rank_save(state, SavePlanner, answer, clock)]
    seconds, _, plan = measure_rank_load(state, metadata, LoadPlanner, clock)
    # Once more, with a place in a file for each chunk that is read: those are looked up.
    ours.append(measure_rank_load(state, with_places(metadata, plan), LoadPlanner, clock)[0])
    stock: list[float | None] = [None, None]
    sent = None
    if is_stock_rank_run:
        stock_clock = clock_of_stock(case, clock)
        stock[0] = measure_rank_save(state, DefaultSavePlanner, None, stock_clock)
        stock[1], sent, _ = measure_rank_load(state, metadata, DefaultLoadPlanner, stock_clock)
    return {
        phase: {"rank_seconds": mine, "stock_rank_seconds": other}
        for phase, mine, other in zip(PHASES, ours, stock, strict=True)
    }, sent


def measure_stock(
    case: Case, load_plan: LoadPlan | None, stock_ranks: int, clock: Clock
) -> tuple[dict[str, Measured], float]:
    """Stock's coordinator's figures for as many ranks as it is run for, and how many times more there are."""
    base = case
    if isinstance(case, (Training, OwnKeys)):
        # Stock merges paths key by key and rank by rank: 1,024 ranks with keys of their own take it a minute.
        is_whole = isinstance(case, OwnKeys) or case.parallel == "pp"
        most = max(stock_ranks, MIN_RANKS) if is_whole else stock_ranks
        base = replace(case, name="", num_ranks=min(case.num_ranks, most))
    clock = clock_of_stock(case, clock)
    stock = {"save": stock_save(base, clock)}
    if load_plan is not None:
        stock["load"] = measure_stock_load(base.num_ranks, load_plan, clock)
    return stock, case.num_ranks / base.num_ranks


@functools.cache
def clock_of_stock(case: Case, clock: Clock) -> Clock:
    """One round for what takes long: the noise is small beside it."""
    return clock if isinstance(case, (Tiny, ManyChunks)) else Clock(1, collect=clock.is_collecting)


@functools.cache
def stock_save(case: Case, clock: Clock) -> Measured:
    """Of one world, which stands for larger ones too."""
    found = measure_stock_save(case, clock)
    found.result = None
    return found


def exponent(rows: Sequence[tuple[float, float]]) -> float:
    """The slope of seconds over size, both as logarithms."""
    points = [(math.log(size), math.log(seconds)) for size, seconds in rows]
    mean_size, mean_seconds = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_size) * (y - mean_seconds) for x, y in points) / sum((x - mean_size) ** 2 for x, _ in points)


def growth(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By phase how the coordinator's planning grows with ranks (405B, from 64 on) and with keys (on 1,024 ranks)."""
    plain = [
        one
        for one in results
        if one["case"]["kind"] == "Training"
        and one["case"]["parallel"] == "fsdp"
        and one["case"]["model"] != "MoE"
        and not one["is_collector_on"]
    ]
    most = max((one["case"]["num_ranks"] for one in plain if one["case"]["model"] == "8B"), default=0)
    series = {
        "ranks": [
            (one["case"]["num_ranks"], one)
            for one in plain
            if one["case"]["model"] == "405B" and one["case"]["num_ranks"] >= MIN_RANKS
        ],
        "keys": [(one["num_keys"], one) for one in plain if one["case"]["num_ranks"] == most],
    }
    return {
        name: {phase: exponent([(size, one[phase]["ours_seconds"]) for size, one in rows]) for phase in PHASES}
        for name, rows in series.items()
        if len(rows) > 1
    }


HEAD = (
    "CPU seconds            ranks  phase       | ours: gather   plan scatter  a rank | stock: gather     plan  scatter"
    "   a rank | MB: ours    stock | peak MB"
)


def print_rows(result: dict[str, Any]) -> None:
    case = result["case"]
    for phase in [*PHASES, "load_half"]:
        row = result.get(phase)
        if row is None:
            continue
        mark = "~" if row.get("is_stock_extrapolated") else " "
        ours = [row.get(name) for name in ("gather_seconds", "plan_seconds", "scatter_seconds", "rank_seconds")]
        stock = [row.get(f"stock_{name}") for name in ("gather_seconds", "plan_seconds", "scatter_seconds")]
        print(
            f"{case['name']:<20} {case['num_ranks']:7,}  {phase:11} |"
            f" {' '.join(shown(one, 7) for one in ours):>38} |"
            f" {mark}{' '.join(shown(one, 8) for one in [*stock, row.get('stock_rank_seconds')]):>38} |"
            f" {row['gather_bytes'] / 1e6:8.2f} {mark}{row.get('stock_gather_bytes', 0) / 1e6:7.0f} |"
            f" {row['peak_bytes'] / 1e6:7.0f}"
        )
    if result["finish"] is not None:
        print(
            f"{case['name']:<20} {case['num_ranks']:7,}  finish      | "
            + ";  ".join(
                f"{name} {shown(row['finish_seconds'], 6)} s, of them {shown(row['metadata_seconds'], 6)} for"
                f" {row['metadata_bytes'] / 1e6:.1f} MB of metadata, {row['gather_bytes'] / 1e6:.1f} MB gathered"
                for name, row in result["finish"].items()
            )
        )


def shown(seconds: float | None, width: int) -> str:
    if seconds is None:
        return "-".rjust(width)
    digits = 1 if seconds >= 10 else 3 if seconds >= 0.01 else 5
    return f"{seconds:{width}.{digits}f}"


def all_cases(worlds: Sequence[int]) -> list[tuple[Case, bool]]:
    """What is run, and whether with the garbage collector on."""
    several = [num_ranks for num_ranks in worlds if MIN_RANKS <= num_ranks <= 1024]
    most = max(several, default=8)
    cases: list[Case] = [Tiny("tiny", num_ranks) for num_ranks in (1, 2, 4, 8)]
    cases += [
        SmallTensors("50,000 tensors", 8),
        ManyChunks("10,000 chunks", 10_000),
        OwnKeys("200 keys of its own", 1024),
    ]
    cases += [Training(model, num_ranks, model) for model in ("8B", "70B") for num_ranks in sorted({MIN_RANKS, most})]
    cases += [Training("405B", num_ranks, "405B") for num_ranks in worlds]
    cases += [Training(f"405B {parallel}", most, parallel=parallel) for parallel in ("hsdp", "unplanned", "pp")]
    cases.append(Training("MoE", most, "MoE"))
    return [*((case, False) for case in cases), (Training("405B collector on", most), True)]


def measure_digests(rounds: int) -> None:
    """Bytes per second of the digests that a save makes of large tensors, by size and dtype."""
    results = {}
    for num_bytes in (2**20, 2**24, 2**28):
        for dtype in (torch.float32, torch.bfloat16):
            count = 2**28 // num_bytes
            tensors = {str(n): torch.ones(num_bytes // dtype.itemsize, dtype=dtype) for n in range(count)}
            seconds = measure_seconds(lambda: digest_large(tensors), num_repeats=rounds)  # noqa: B023
            name = f"{count} x {num_bytes // 2**20} MiB, {str(dtype).removeprefix('torch.')}"
            results[name] = {"bytes_per_second": 2**28 / seconds, "seconds_per_tensor": seconds / count}
            print(f"{name:24} {2**28 / seconds / 1e9:6.1f} GB/s  {1e3 * seconds / count:8.3f} ms a tensor")
    sizes = {"threads": torch.get_num_threads(), "rounds": rounds}
    path = write_results("digests", sizes=sizes, results=results)
    print(f"\nwritten: benchmarks/results/{path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="one case: a multiple of 64")
    parser.add_argument("--model", choices=MODELS, default="405B")
    parser.add_argument("--parallel", choices=["fsdp", "hsdp", "unplanned", "pp"], default="fsdp")
    parser.add_argument("--json", type=Path, help="where the one case goes")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLD_SIZES, help="the worlds of the table")
    parser.add_argument("--stock-ranks", type=int, default=32, help="the most ranks that stock is run for")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--digests", action="store_true", help="the digests of tensors on part of the ranks, alone")
    arguments = parser.parse_args()
    if arguments.digests:
        measure_digests(arguments.rounds)
        return
    print(HEAD)
    clocks = {collect: Clock(arguments.rounds, collect=collect) for collect in (False, True)}
    if arguments.ranks is not None:
        case = Training(arguments.model, arguments.ranks, arguments.model, arguments.parallel)
        result = run_case(case, arguments.stock_ranks, clocks[False])
        print_rows(result)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        return
    results = []
    for case, collect in all_cases(arguments.worlds):
        is_plain = not isinstance(case, Training) or case.name in STOCK_RANKS and case.num_ranks == MOST_STOCK_RANKS
        results.append(run_case(case, arguments.stock_ranks, clocks[collect], is_stock_rank_run=is_plain))
        print_rows(results[-1])
    exponents = growth(results)
    for name, of_phases in exponents.items():
        print(f"growth with {name}: " + ", ".join(f"{phase} {value:.2f}" for phase, value in of_phases.items()))
    sizes = {"tp": TP, "stock_ranks": arguments.stock_ranks, "rounds": arguments.rounds}
    path = write_results("plan", sizes=sizes, results={"cases": results, "growth_exponents": exponents})
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
