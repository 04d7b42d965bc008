"""Planning of saves and loads of Llama with AdamW on many ranks, on the coordinator: ours against stock DCP.

    python benchmarks/bench_plan.py                  all cases: a table, and results/plan_<machine>.json
    python benchmarks/bench_plan.py --ranks 1024 --model 405B --json case.json

Ranks are simulated in one process. What each rank would send is made first and pickled, as DCP's gather does; timed is
what the coordinator then does with it, in CPU seconds: unpickling ("gather"), planning, and pickling each rank's answer
("scatter"). Bytes gathered are the longest message times the ranks, because DCP pads. Stock gets the same state, one
write item per shard, and is run up to --stock-ranks ranks; beyond, its seconds and bytes grow in proportion to ranks,
and are marked as extrapolated. Tensors are described, not allocated, but for the one rank whose part of a load is
timed.

The states: parameters, exp_avg and exp_avg_sq on a mesh dp x tp 8 ("fsdp"), replicas of it ("hsdp"), or one mesh per
pipeline stage of eight ("pp"); and a step per parameter, a plain tensor that all ranks hold.
"""

import argparse
import functools
import gc
import hashlib
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llama_405b import SIZES, ShardedTensor, list_tensors
from result_file import write_results
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_ext.checkpoint.key_table import KeyTable, TensorEntry
from torchtitan_ext.checkpoint.load_planner import LoadPlanner, ReadDecision
from torchtitan_ext.checkpoint.load_rules import ReadRequest
from torchtitan_ext.checkpoint.rank_table import RankTable, encode_table
from torchtitan_ext.checkpoint.save_planner import CachedTable, SavePlanner
from torchtitan_ext.layout.layout import MeshLayout, ShardReport, candidate_steps, shard_of

TP = 8
all_tensors = functools.cache(functools.partial(list_tensors, TP))
NUM_STAGES = 8
WORLD_SIZES = [8, 64, 256, 1024, 8192]
RULES = "None, Source()"


@dataclass(frozen=True)
class Case:
    """One world that saves one model."""

    model: str
    num_ranks: int
    parallel: str = "fsdp"

    def tensors(self, rank: int) -> list[ShardedTensor]:
        """The parameters that a rank holds a part of."""
        tensors = all_tensors(self.model)
        if self.parallel != "pp":
            return tensors
        num_layers, stage = SIZES[self.model].num_layers, rank // (self.num_ranks // NUM_STAGES)
        first, last = stage * num_layers // NUM_STAGES, (stage + 1) * num_layers // NUM_STAGES
        return [t for t in tensors if first <= (int(t.fqn.split(".")[1]) if t.fqn.startswith("layers") else 0) < last]

    def mesh(self, rank: int) -> tuple[MeshLayout, tuple[int, ...]]:
        """The mesh of a rank's parameters, and where it stands there."""
        if self.parallel == "hsdp":
            shape: tuple[int, ...] = (2, self.num_ranks // TP // 2, TP)
            return MeshLayout(shape, tuple(range(self.num_ranks)), ("dp_replicate", "dp_shard", "tp")), (
                rank // (shape[1] * TP),
                rank // TP % shape[1],
                rank % TP,
            )
        size = self.num_ranks // (NUM_STAGES if self.parallel == "pp" else 1)
        begin = rank // size * size
        ranks = tuple(range(begin, begin + size))
        return MeshLayout((size // TP, TP), ranks, ("dp", "tp")), ((rank - begin) // TP, rank % TP)

    def table(self, rank: int) -> KeyTable:
        """What a rank holds."""
        entries: dict[str, TensorEntry] = {}
        digests: dict[str, bytes] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        mesh, coordinate = self.mesh(rank)
        known: dict[Any, TensorEntry] = {}
        step = TensorEntry(ShardReport(()), torch.float32, False)
        tensors = self.tensors(rank)
        for _, shape, placements in tensors:
            if (shape, placements) not in known:
                own = placements if len(mesh.shape) == 2 else ((-1, 1), *placements)
                report = ShardReport(shape, mesh, coordinate, own)
                report = replace(report, local_sizes=shard_of(report, candidate_steps(report)[0]).sizes)
                known[shape, placements] = TensorEntry(report, torch.float32, False)
        parts = [("model", t) for t in tensors]
        parts += [(part, t) for t in tensors for part in ("step", "exp_avg", "exp_avg_sq")]
        for part, (fqn, shape, placements) in parts:
            name = f"model.{fqn}" if part == "model" else f"optimizer.state.{fqn}.{part}"
            entries[name] = step if part == "step" else known[shape, placements]
            paths[name] = ("model", fqn) if part == "model" else ("optimizer", "state", fqn, part)
            if part == "step":
                digests[name] = b"the same step  3"
            elif placements[1][0] < 0:
                digests[name] = hashlib.blake2b(f"{name} {coordinate[-2]}".encode(), digest_size=16).digest()
        return KeyTable(entries, digests, paths)


def messages_of(case: Case) -> list[RankTable]:
    """What all ranks send. Ranks with equal keys differ in their part and digests only, which are made for each."""
    messages: list[RankTable] = []
    whole: dict[Any, RankTable] = {}
    for rank in range(case.num_ranks):
        mesh, coordinate = case.mesh(rank)
        digests_of = (mesh.ranks[0], coordinate[:-1])  # equal over tp
        if digests_of not in whole:
            whole[digests_of] = encode_table(case.table(rank)).message
        messages.append(replace(whole[digests_of], part=part_of(case, rank)))
    for rank in (0, case.num_ranks // 3, case.num_ranks - 1):
        assert messages[rank] == encode_table(case.table(rank)).message
    return messages


def part_of(case: Case, rank: int) -> bytes:
    """A rank's part, from one key per kind: it has nothing else in it."""
    mesh, coordinate = case.mesh(rank)
    entries: dict[str, TensorEntry] = {}
    for shape, placements in dict.fromkeys((shape, placements) for _, shape, placements in case.tensors(rank)):
        own = placements if len(mesh.shape) == 2 else ((-1, 1), *placements)
        report = ShardReport(shape, mesh, coordinate, own)
        local_sizes = shard_of(report).sizes
        entries[f"{shape}{placements}"] = TensorEntry(replace(report, local_sizes=local_sizes), torch.float32, False)
    return encode_table(KeyTable(entries)).message.part


def stock_plan(case: Case, rank: int) -> SavePlan:
    """What a rank of stock sends: one item per shard, as its default planner makes them."""
    items = []
    for fqn, entry in case.table(rank).entries.items():
        assert isinstance(entry, TensorEntry)
        (chunk,) = shard_of(entry.report).chunks
        # Stock makes objects of its own for every item.
        made = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.report.global_shape),
        )
        item_type = WriteItemType.TENSOR if entry.report.mesh is None else WriteItemType.SHARD
        items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), item_type, tensor_data=made))
    return SavePlan(items, planner_data=dict(case.table(rank).stock_paths))


@dataclass
class Measured:
    """CPU seconds and bytes of the coordinator."""

    gather_seconds: float
    plan_seconds: float
    scatter_seconds: float
    gather_bytes: int
    peak_bytes: int
    result: Any = None

    def row(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "result"}


def measure(sent: list[bytes], plan: Callable[[list[Any]], Any], *, collect: bool) -> Measured:
    """Unpickles what all ranks sent, plans, and pickles the answers."""
    gc.collect()
    (gc.enable if collect else gc.disable)()
    before = resident_bytes(reset=True)
    times = [time.process_time()]
    received = [pickle.loads(message) for message in sent]
    times.append(time.process_time())
    result = plan(received)
    times.append(time.process_time())
    for answer in result[0] if isinstance(result, tuple) else result:
        pickle.dumps(answer)
    times.append(time.process_time())
    peak = max(0, peak_resident_bytes() - before)
    gc.enable()
    seconds = [end - begin for begin, end in zip(times, times[1:], strict=False)]
    return Measured(*seconds, max(map(len, sent)) * len(sent), peak, result)


def resident_bytes(*, reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextmanager
def empty_caches() -> Iterator[None]:
    caches = [cache for name, cache in vars(StockSavePlanner).items() if name.startswith("_cached_")]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def measure_saves(case: Case, *, collect: bool) -> tuple[dict[str, Measured], Metadata, float]:
    """First and second save, the metadata, and the seconds to pickle it."""
    messages = messages_of(case)
    planner = SavePlanner(enable_plan_caching=True)
    planner.is_coordinator = True
    with empty_caches():
        first = measure(
            [pickle.dumps(SavePlan([], planner_data=message)) for message in messages],
            planner.create_global_plan,
            collect=collect,
        )
        plans, metadata = first.result
        token = plans[0].planner_data.token
        cached = [
            SavePlan([], planner_data=CachedTable(table.structure(), token, rank, table.digests), usable=False)
            for rank, table in enumerate(messages)
        ]
        second = measure([pickle.dumps(plan) for plan in cached], planner.create_global_plan, collect=collect)
        assert not any(plan.usable for plan in second.result[0])
    begin = time.process_time()
    stored = pickle.dumps(metadata)
    return {"first_save": first, "second_save": second}, pickle.loads(stored), time.process_time() - begin


def measure_load(case: Case, metadata: Metadata, *, collect: bool) -> Measured:
    planner = LoadPlanner()
    planner.metadata = metadata
    requests = [
        LoadPlan([], planner_data=ReadRequest(replace(message, digests=()), "one", RULES))
        for message in messages_of(case)
    ]
    return measure([pickle.dumps(plan) for plan in requests], planner.create_global_plan, collect=collect)


def measure_stock(case: Case, *, collect: bool) -> Measured:
    sent = [pickle.dumps(stock_plan(case, rank)) for rank in range(case.num_ranks)]
    planner = DefaultSavePlanner()
    return measure(sent, planner.create_global_plan, collect=collect)


def state_of(case: Case, rank: int) -> dict[str, Any]:
    """The real tensors of one rank; their memory is never touched."""
    layout, _ = case.mesh(rank)
    ranks = torch.tensor(layout.ranks).view(layout.shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=layout.dim_names, _init_backend=False, _rank=rank)
    state: dict[str, Any] = {}
    for fqn, entry in case.table(rank).entries.items():
        assert isinstance(entry, TensorEntry)
        report = entry.report
        if report.mesh is None:
            state[fqn] = torch.zeros(())
            continue
        placements = [
            Replicate() if dim < 0 else Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            for dim, factor in report.placements
        ]
        stride = torch.empty(report.global_shape, device="meta").stride()
        local = torch.empty(report.local_sizes)
        state[fqn] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(report.global_shape), stride=stride
        )
    return state


def measure_rank_load(case: Case, metadata: Metadata, *, collect: bool) -> tuple[float, float]:
    """CPU seconds of one rank's part of a load, ours and stock's."""
    rank = case.num_ranks // 2 + 1
    state, seconds = state_of(case, rank), []
    flat = Metadata(metadata.state_dict_metadata)
    for make in (LoadPlanner, DefaultLoadPlanner):
        planner: Any = make(flatten_state_dict=False)
        gc.collect()
        (gc.enable if collect else gc.disable)()
        begin = time.process_time()
        planner.set_up_planner(dict(state), flat, is_coordinator=False)
        plan = planner.create_local_plan()
        if make is LoadPlanner:
            plan = replace(plan, planner_data=ReadDecision({}, True, None))
        planner.finish_plan(plan)
        seconds.append(time.process_time() - begin)
        gc.enable()
    return seconds[0], seconds[1]


def run_case(case: Case, stock_ranks: int, *, collect: bool) -> dict[str, Any]:
    """All figures of one case."""
    measured, metadata, metadata_seconds = measure_saves(case, collect=collect)
    loading = replace(case, num_ranks=2 * case.num_ranks)
    measured["load"] = measure_load(loading, metadata, collect=collect)
    if NUM_STAGES * TP < case.num_ranks <= 1024:
        measured["load_half"] = measure_load(replace(case, num_ranks=case.num_ranks // 2), metadata, collect=collect)
    rows: dict[str, Any] = {}
    for name, figures in measured.items():
        rows[name] = {"ours_seconds": figures.plan_seconds, **figures.row(), "stock_seconds": None}
    base = replace(case, num_ranks=min(case.num_ranks, max(stock_ranks, NUM_STAGES * TP)))
    stock = measure_stock(base, collect=collect)
    factor = case.num_ranks / base.num_ranks
    rows["first_save"] |= {
        "stock_seconds": stock.plan_seconds * factor,
        "stock_gather_seconds": stock.gather_seconds * factor,
        "stock_gather_bytes": stock.gather_bytes * factor,
        "is_stock_extrapolated": factor > 1,
    }
    ours_rank, stock_rank = measure_rank_load(case, metadata, collect=collect)
    return {
        "case": vars(case),
        "is_collector_on": collect,
        **rows,
        "metadata_pickle_and_unpickle_seconds": metadata_seconds,
        "rank_load_seconds": ours_rank,
        "stock_rank_load_seconds": stock_rank,
    }


def time_tiny(num_ranks: int, make: Callable[[], Any], num_repeats: int = 30) -> float:
    """Wall seconds of one save's planning of a tiny state, all ranks one after the other; the best of many."""
    states = [{"model": {f"w{i}": torch.zeros(3) for i in range(10)}, "step": 1} for _ in range(num_ranks)]
    best = float("inf")
    for _ in range(num_repeats):
        planners = [make() for _ in states]
        begin = time.perf_counter()
        plans = []
        for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
        sent = [pickle.loads(pickle.dumps(plan)) for plan in plans]
        answers, _ = planners[0].create_global_plan(sent)
        for planner, answer in zip(planners, answers, strict=True):
            planner.finish_plan(pickle.loads(pickle.dumps(answer)))
        best = min(best, time.perf_counter() - begin)
    return best


def print_row(result: dict[str, Any]) -> None:
    case, save = result["case"], result["first_save"]
    mark = "~" if save["is_stock_extrapolated"] else " "
    print(
        f"{case['model']:>5} {case['parallel']:>5} {case['num_ranks']:6,}"
        f" | {save['plan_seconds']:8.3f} {mark}{save['stock_seconds']:9.2f}"
        f" | {result['second_save']['plan_seconds'] * 1e3:8.1f} | {result['load']['plan_seconds']:8.3f}"
        f" | {save['gather_bytes'] / 1e6:8.2f} {mark}{save['stock_gather_bytes'] / 1e6:9.0f}"
        f" | {save['peak_bytes'] / 1e6:7.0f}"
        f" | {result['rank_load_seconds']:6.3f} {result['stock_rank_load_seconds']:6.2f}",
        flush=True,
    )


def print_head() -> None:
    print(
        "  planning, CPU seconds | first save: ours, stock | second, ms | load x 2 | MB gathered: ours, stock | peak MB"
        " | a rank's load: ours, stock   (~ extrapolated)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="one case: a multiple of 64")
    parser.add_argument("--model", choices=list(SIZES), default="405B")
    parser.add_argument("--parallel", choices=["fsdp", "hsdp", "pp"], default="fsdp")
    parser.add_argument("--json", type=Path, help="where the one case goes")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLD_SIZES, help="the worlds of the table")
    parser.add_argument("--stock-ranks", type=int, default=64, help="the most ranks that stock is run for")
    arguments = parser.parse_args()
    print_head()
    if arguments.ranks is not None:
        case = Case(arguments.model, arguments.ranks, arguments.parallel)
        result = run_case(case, arguments.stock_ranks, collect=False)
        print_row(result)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        return
    # Layouts of several meshes need at least a node per stage.
    several = [num_ranks for num_ranks in arguments.worlds if NUM_STAGES * TP <= num_ranks <= 1024]
    cases = [Case(model, num_ranks) for model in ("8B", "70B") for num_ranks in several]
    cases += [Case("405B", num_ranks) for num_ranks in arguments.worlds]
    cases += [Case("405B", num_ranks, parallel) for parallel in ("hsdp", "pp") for num_ranks in several]
    results = []
    for case, collect in [*((case, False) for case in cases), (Case("405B", max(several, default=8)), True)]:
        results.append(run_case(case, arguments.stock_ranks, collect=collect))
        print_row(results[-1])
    tiny = [
        {
            "num_ranks": num_ranks,
            "ours_seconds": time_tiny(num_ranks, SavePlanner),
            "stock_seconds": time_tiny(num_ranks, DefaultSavePlanner),
        }
        for num_ranks in (1, 2, 4, 8)
    ]
    for row in tiny:
        print(f"tiny state, {row['num_ranks']} ranks: {row['ours_seconds']:.4f} s, stock {row['stock_seconds']:.4f} s")
    sizes = {"tp": TP, "stock_ranks": arguments.stock_ranks}
    path = write_results("plan", sizes=sizes, results={"cases": results, "tiny": tiny})
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
