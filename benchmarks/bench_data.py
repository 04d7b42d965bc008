"""Samples per second, longest wait of a step and memory of data loaders; starts in huge epochs; states of many shards.

    python benchmarks/bench_data.py [--processes 1 2] [--workers 0 2] [--rounds 2] [--seconds 0.8]

Text is encoded and packed into sequences of 2,048 tokens, batches of 8; samples of map-style data are inputs and labels
of 2,048 tokens each, batches of 32, a million samples in random order. Contenders (data_contenders.py) take turns,
round by round: each serves batches for some seconds on all processes at once, after two that warm up. A rate is of all
processes together, the highest over the rounds; its ratio is to the highest of all contenders. Then each contender
feeds steps that take 1.5 times as long as the fastest one needs for a batch, asleep as a trainer that waits for its
GPU: the longest wait for a batch, the first five left out. Microseconds are the CPU time of the trainer's process for a
sample; megabytes the proportional memory (Pss) of a process and its workers beyond that before, of the process with
most.

Starts: a new loader over 10 million and over a billion samples until its first batch, and from a state in the middle of
an epoch, beside torch's and torchdata's for 10 million; memory is the peak beyond that before. States: ``state_dict()``
of 240 shards of packed text. Writes results/data_<machine>.json, unless --dry.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from data_contenders import (
    BEST_OF,
    CONTENDERS,
    NUM_SHARDS,
    OURS,
    Contender,
    Feed,
    Rows,
    documents,
    encode_sample,
    installed,
    installed_versions,
    packed,
    vocabulary,
)
from result_file import write_results
from torch.utils.data import DataLoader, RandomSampler

from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams, PackedTokens

BATCH_SIZES = {"text": 8, "map-style": 32}
SLEEPY = 1.5
NUM_STEPS, NUM_FIRST_STEPS = 45, 5
SIZES = {"10 million": 10_000_000, "1 billion": 1_000_000_000}
START_SECONDS, STATE_SECONDS = 0.050, 0.002

Row = dict[str, Any]


# ---- memory ----
def family(process: int) -> list[int]:
    """A process and all that it has started."""
    found = [process]
    with suppress(ProcessLookupError, FileNotFoundError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


def proportional_megabytes() -> float:
    total = 0
    for process in family(os.getpid()):
        with suppress(ProcessLookupError, FileNotFoundError, StopIteration):  # a worker that has just ended
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6


def status_megabytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# ---- rates and waits ----
def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def serve(make: Contender, feed: Feed, seconds: float) -> Row:
    """Batches of this rank for some seconds."""
    settle()
    before = proportional_megabytes()
    batches = make(feed)
    try:
        for _ in range(2):
            next(batches)
        begin, begin_cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < seconds:
            next(batches)
            count += 1
        spent, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        megabytes = proportional_megabytes() - before
        return {"batches_per_second": count / spent, "cpu_seconds": cpu_seconds / count, "megabytes": megabytes}
    finally:
        close(batches)


def longest_wait(make: Contender, feed: Feed, step_seconds: float) -> float:
    batches = make(feed)
    waits = []
    try:
        for _ in range(NUM_STEPS):
            begin = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - begin)
            time.sleep(step_seconds)
    finally:
        close(batches)
    return max(waits[NUM_FIRST_STEPS:])


def close(batches: Iterator[Any]) -> None:
    """Ends the workers of an iterator."""
    ender = getattr(batches, "close", None) or getattr(batches, "_shutdown_workers", None)
    if ender is not None:
        ender()
    del batches
    gc.collect()


def together(call: Callable[[], Any]) -> tuple[list[Any], str]:
    """What a call returns on each rank, or why it failed on one."""
    dist.barrier()
    value, failure = None, ""
    try:
        value = call()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    failures = of_all_ranks(failure)
    return of_all_ranks(value), next(filter(None, failures), "")


def compare_rates(kind: str, feed: Feed, options: argparse.Namespace) -> dict[str, Row]:
    contenders = installed(kind)
    rows: dict[str, Row] = {name: {} for name in contenders}
    for _ in range(options.rounds):
        for name, make in contenders.items():
            if "failed" in rows[name]:
                continue
            served, failure = together(lambda make=make: serve(make, feed, options.seconds))  # type: ignore[misc]
            if failure:
                rows[name] = {"failed": failure}
                continue
            rate = sum(one["batches_per_second"] for one in served) * feed.batch_size
            cpu_us = 1e6 * max(one["cpu_seconds"] for one in served) / feed.batch_size
            megabytes = max(one["megabytes"] for one in served)
            rows[name] = {
                "samples_per_second": max(rate, rows[name].get("samples_per_second", 0.0)),
                "trainer_cpu_us": min(cpu_us, rows[name].get("trainer_cpu_us", cpu_us)),
                "megabytes": max(megabytes, rows[name].get("megabytes", 0.0)),
            }
    good = {name: row for name, row in rows.items() if "failed" not in row}
    best = max(row["samples_per_second"] for row in good.values())
    step_seconds = SLEEPY * feed.batch_size * feed.world_size / best
    for name, row in good.items():
        waits, failure = together(lambda name=name: longest_wait(contenders[name], feed, step_seconds))  # type: ignore[misc]
        row["samples_per_second"] = round(row["samples_per_second"], 1)
        row["ratio"] = round(row["samples_per_second"] / best, 3)
        row["longest_wait_ms"] = None if failure else round(1e3 * max(waits), 1)
        row["step_ms"] = round(1e3 * step_seconds, 1)
        row["trainer_cpu_us"] = round(row["trainer_cpu_us"], 1)
        row["megabytes"] = round(row["megabytes"], 1)
    return rows


def print_rates(title: str, rows: dict[str, Row]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:20} {row['failed']}", flush=True)
            continue
        wait = "-" if row["longest_wait_ms"] is None else f"{row['longest_wait_ms']:.1f}"
        below = f"  below {BEST_OF}" if name == OURS and row["ratio"] < BEST_OF else ""
        print(
            f"  {name:20} {row['samples_per_second']:9.0f}/s {row['ratio']:6.2f}  longest wait {wait:>7} ms "
            f"(step {row['step_ms']:.1f} ms) {row['trainer_cpu_us']:8.1f} us {row['megabytes']:8.1f} MB{below}",
            flush=True,
        )


# ---- starts in huge epochs ----
def timed_start(call: Callable[[], Any]) -> Row:
    """Seconds until the first batch, the least of three; memory of the first."""
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_megabytes("VmRSS")
    seconds, megabytes = [], 0.0
    for _ in range(3):
        begin = time.perf_counter()
        batches = call()
        next(batches)
        seconds.append(time.perf_counter() - begin)
        megabytes = megabytes or status_megabytes("VmHWM") - before
        close(batches)
        del batches
        if seconds[0] > 1:
            break
    return {
        "ms": round(1e3 * min(seconds), 2),
        "first_ms": round(1e3 * seconds[0], 2),
        "megabytes": round(megabytes, 1),
    }


def start_of_ours(num_samples: int, next_sample: int, **options: Any) -> Callable[[], Iterator[Any]]:
    def start() -> Iterator[Any]:
        loader = ElasticDataLoader(Rows(num_samples), global_batch_size=64, dp_rank=1, dp_size=2, **options)
        if next_sample:
            (common,) = loader.state_dict()["loader"]
            loader.load_state_dict({"loader": ({**common, "next_sample": next_sample},)})
        return iter(loader)

    return start


def start_of_torch(num_samples: int) -> Iterator[Any]:
    data = Rows(num_samples)
    return iter(DataLoader(data, batch_size=32, sampler=RandomSampler(data)))  # type: ignore[arg-type]


def starts() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, num_samples in SIZES.items():
        for what, next_sample in (("start", 0), ("resume", num_samples // 2)):
            rows[f"{OURS}, {what}, {name}"] = timed_start(start_of_ours(num_samples, next_sample))
    (name, num_samples), *_ = SIZES.items()
    rows[f"DataLoader, start, {name}"] = timed_start(lambda: start_of_torch(num_samples))
    try:
        older = {"order": "randperm"}
        ElasticDataLoader(Rows(8), batch_size=1, **older)
        rows[f"{OURS} with randperm, start, {name}"] = timed_start(start_of_ours(num_samples, 0, **older))
    except (TypeError, ValueError) as error:
        print(error)
    print("\nUntil the first batch")
    for title, row in rows.items():
        goal = row["ms"] <= 1e3 * START_SECONDS or not title.startswith(f"{OURS}, ")
        late = "" if goal else f"  more than {1e3 * START_SECONDS:.0f} ms"
        print(f"  {title:42} {row['ms']:9.2f} ms {row['megabytes']:8.1f} MB{late}", flush=True)
    return rows


# ---- states of many shards ----
def states(num_workers: list[int]) -> dict[str, Row]:
    rows = {}
    for count in num_workers:
        source = PackedTokens(IndexedStreams(documents(), num_shards=240), seq_len=2048, encode=encode_sample)
        options = {"num_workers": count} if count else {}
        title = f"240 shards, {count} workers"
        try:
            loader = ElasticDataLoader(source, global_batch_size=240, endless=True, **options)
            batches = iter(loader)
            for _ in range(3):
                next(batches)
        except ValueError as error:
            rows[title] = {"failed": str(error)[:200]}
            continue
        seconds = []
        for _ in range(20):
            begin = time.perf_counter()
            loader.state_dict()
            seconds.append(time.perf_counter() - begin)
        close(batches)
        rows[title] = {"ms": round(1e3 * statistics.median(seconds), 3), "most_ms": round(1e3 * max(seconds), 3)}
    print("\nstate_dict()")
    for title, row in rows.items():
        late = "  more than 2 ms" if row.get("ms", 0) > 1e3 * STATE_SECONDS else ""
        print(f"  {title:42} " + (row.get("failed") or f"{row['ms']:9.3f} ms{late}"), flush=True)
    return rows


def run(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # As under torchrun; processes that were spawned would spawn their workers.
    multiprocessing.set_start_method("fork", force=True)
    vocabulary()  # before the workers are there, and before memory is measured
    packed(NUM_SHARDS)
    for kind in options.kinds:
        for num_workers in options.workers:
            feed = Feed(rank, world_size, BATCH_SIZES[kind], num_workers)
            rows = compare_rates(kind, feed, options)
            title = f"{world_size} process{'es' if world_size > 1 else ''}, {kind}, {num_workers} workers"
            if rank == 0:
                results[title] = rows
                print_rates(title, rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--kinds", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--dry", action="store_true", help="write no result file")
    options = parser.parse_args()
    with mp.Manager() as manager, tempfile.TemporaryDirectory(prefix="tte_data_") as folder:
        results = manager.dict()
        for world_size in options.processes:
            mp.spawn(run, (world_size, Path(folder), options, results), nprocs=world_size)
        measured = dict(results)
    measured["starts"] = starts()
    measured["states"] = states(options.workers)
    if not options.dry:
        sizes = {name: getattr(options, name) for name in ("processes", "workers", "rounds", "seconds")}
        print(write_results("data", sizes={**sizes, "libraries": installed_versions()}, results=measured))


if __name__ == "__main__":
    main()
