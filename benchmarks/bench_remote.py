"""Saves to and loads from an object store: ours, and others' DCP storage, as multiples of obstore alone.

    python benchmarks/bench_remote.py --directory <in memory>

A state has --gigabytes (of all processes together) in 120 tensors, DTensors cut by rows as FSDP2 does. Raw: each rank
puts as many bytes as one object by obstore, in parts of 16 MiB, 8 at a time, and gets them again by ranges of 16 MiB,
8 at a time, into its own memory: the sizes and numbers of ours. Contenders take turns, round by round; a time is the
slowest process's, and a ratio is one of minima over the rounds, to the fastest raw way. Loads verify.

The server runs on the same cores, and new for each save: the table has the seconds of CPU that the ranks and the server
took. `seaweedfs` is the tests' server: it hashes and writes what it gets, and takes most of the time. `memory` is one
that costs nearly nothing (memory_store.py), beside which the clients' own work shows; peers do not go there. Then 4,000
tensors of 64 KiB of one process, beside one object of their size; and the peak of resident memory of a rank beyond the
state, in processes that have done nothing else.

With --megabits, ours and raw again through a link of so many megabits a second each way (limited_link.py), as multiples
of the time that the state's bytes take on it. Writes results/remote_<machine>.json.
"""

import argparse
import gc
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contest import Contenders, compare, first_call
from limited_link import enter_namespace
from measured_worlds import run_worlds
from remote_contenders import (
    PART_BYTES,
    PARTS_AT_A_TIME,
    PEERS,
    REQUEST_BYTES,
    REQUESTS_AT_A_TIME,
    Contender,
    Raw,
    installed_versions,
    load_ours,
    make_peers,
    save_ours,
)
from result_file import write_results
from storage_states import ROWS, State, Workload, check, clear, filled, large
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from world_server import SERVERS, WorldServer

OURS = Contender("ours", save_ours, load_ours)
SMALL = Workload(4000, (16, 1024), torch.float32)
Rows = dict[str, dict[str, Any]]


class Case:
    """One state on one mesh, and the server that it goes to."""

    def __init__(
        self, workload: Workload, mesh: DeviceMesh, others: list[Contender], num_rounds: int, server: WorldServer
    ) -> None:
        self.workload = workload
        self.mesh = mesh
        self.contenders = [OURS, *others]
        self.num_rounds = num_rounds
        self.server = server
        self.state, memory = in_one_memory(filled(workload, mesh, ROWS), mesh)
        self.raw = Raw(memory)
        self._cpu: dict[str, list[tuple[float, float]]] = {}

    def measure_saves(self) -> Rows:
        calls: Contenders = {
            "raw, put": lambda: self.raw.put(self.server.url("raw")),
            "raw, writer": lambda: self.raw.write(self.server.url("raw")),
        }
        calls |= {one.name: partial(one.save, self.state, self.server.url(one.name)) for one in self.contenders}
        return self._compare(calls, before=self.server.restart)

    def measure_loads(self) -> Rows:
        self.server.restart()
        self.raw.write(self.server.url("raw"))
        calls: Contenders = {"raw, ranges": lambda: self.raw.get(self.server.url("raw"))}
        for one in self.contenders:
            try:
                one.save(self.state, self.server.url(one.name))
            except Exception:  # told by the saves
                continue
            calls[one.name] = partial(one.load, self.state, self.server.url(one.name))
        return self._compare(
            calls,
            before_first=lambda: clear(self.state),
            after_first=lambda: check(self.workload, self.mesh, ROWS, self.state),
        )

    def close(self) -> None:
        self.server.close()

    def _compare(self, calls: Contenders, **hooks: Callable[[], None]) -> Rows:
        self._cpu = {name: [] for name in calls}
        counted = {name: partial(self._count_cpu, name, call) for name, call in calls.items()}
        rows = compare(counted, self.num_rounds, **hooks)
        for name, row in rows.items():
            if "failed" not in row:
                ranks, server = min(self._cpu[name])
                row |= {"cpu_seconds": round(ranks, 2), "server_cpu_seconds": round(server, 2)}
        return rows

    def _count_cpu(self, name: str, call: Callable[[], Any]) -> None:
        ranks, server = _own_cpu_seconds(), self.server.cpu_seconds()
        call()
        spent = torch.tensor(_own_cpu_seconds() - ranks, dtype=torch.float64)
        dist.all_reduce(spent)
        self._cpu[name].append((spent.item(), self.server.cpu_seconds() - server))


def in_one_memory(state: State, mesh: DeviceMesh) -> tuple[State, np.ndarray]:
    """A state whose local tensors lie one after the other in memory, and that memory as bytes."""
    memory = torch.cat([tensor.to_local().reshape(-1) for tensor in state.values()])
    moved, end = {}, 0
    for name, tensor in state.items():
        local = tensor.to_local()
        begin, end = end, end + local.numel()
        moved[name] = DTensor.from_local(memory[begin:end].view(local.shape), mesh, [Shard(ROWS)], run_check=False)
    return moved, memory.numpy().view(np.uint8)


def run(rank: int, world_size: int, folder: Path, options: argparse.Namespace, server: str, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    others = make_peers(options.peers) if server == "seaweedfs" else []
    name = f"{server}, {processes(world_size)}"
    cases = {f"{name}, {options.gigabytes:g} GB": large(options.gigabytes, torch.float32, world_size)}
    if world_size == 1 and options.small:
        cases[f"{name}, 4,000 x 64 KiB"] = SMALL
    for title, workload in cases.items():
        case = Case(workload, mesh, others if workload is not SMALL else [], options.rounds, WorldServer(server))
        record(results, f"{title}, save", case.measure_saves())
        record(results, f"{title}, load", case.measure_loads())
        case.close()


def run_memory(rank: int, world_size: int, folder: Path, options: argparse.Namespace, step: str, results: Any) -> None:
    """The memory that a first save or load takes; of a load, what was saved is written by another process before."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = filled(large(options.gigabytes, torch.float32, world_size), mesh, ROWS)
    server = WorldServer("memory")
    server.restart()
    url = server.url("ours")
    if step == "load":
        save_in_another_process(options.gigabytes, world_size, url)
    gc.collect()
    call = partial(save_ours, state, url) if step == "save" else partial(load_ours, state, url)
    title = f"memory, {processes(world_size)}, {options.gigabytes:g} GB, first {step} of a process"
    record(results, title, {"ours": first_call(call)})
    server.close()


def save_in_another_process(gigabytes: float, world_size: int, url: str) -> None:
    """What all ranks would save, by a world of its own."""
    if dist.get_rank() == 0:
        run_worlds(run_source, [world_size], None, gigabytes, url)
    dist.barrier()


def run_source(rank: int, world_size: int, folder: Path, gigabytes: float, url: str, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    save_ours(filled(large(gigabytes, torch.float32, world_size), mesh, ROWS), url)


def run_on_link(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    workload = large(options.gigabytes, torch.float32, world_size)
    case = Case(workload, mesh, [], max(2, options.rounds // 2), WorldServer("memory", options.megabits))
    link_seconds = workload.count * workload.shape[0] * workload.shape[1] * 4 * 8 / (options.megabits * 1e6)
    title = f"memory, {processes(world_size)}, {options.gigabytes:g} GB, {options.megabits} Mbit/s"
    for step, measure in (("save", case.measure_saves), ("load", case.measure_loads)):
        rows = measure()
        for row in rows.values():
            row["ratio_to_link"] = round(row["seconds"] / link_seconds, 3)
        record(results, f"{title}, {step}", rows)
    case.close()


def processes(world_size: int) -> str:
    return f"{world_size} process{'es' if world_size > 1 else ''}"


def record(results: Any, title: str, rows: Rows) -> None:
    if dist.get_rank() == 0:
        results[title] = rows
        print_rows(title, rows)


def print_rows(title: str, rows: Rows) -> None:
    """Seconds, the ratio to raw or to the link, memory, and the CPU of the ranks and of the server."""
    print(f"\n{title}")
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:28} {row['failed']}", flush=True)
            continue
        ratio = row.get("ratio_to_link", row.get("ratio", float("nan")))
        cpu = (
            f"CPU {row['cpu_seconds']:5.2f} s, server {row['server_cpu_seconds']:5.2f} s"
            if "cpu_seconds" in row
            else ""
        )
        print(f"  {name:28} {row['seconds']:8.3f} s {ratio:8.3f} {row['megabytes']:8.1f} MB  {cpu}", flush=True)


def _own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the server keeps its objects")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=list(SERVERS), help="in this order")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=True, help="4,000 small tensors")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="the peak of memory")
    parser.add_argument("--megabits", type=int, help="of a link through which ours and raw go once more")
    options = parser.parse_args()
    os.environ["TMPDIR"] = options.directory  # of the server too
    results: dict[str, Any] = {}
    for server in options.servers:
        measure(results, options, run, server)
    for step in ("save", "load") if options.memory else ():
        measure(results, options, run_memory, step)
    if options.megabits is not None:
        enter_namespace()
        measure(results, options, run_on_link)


def measure(results: dict[str, Any], options: argparse.Namespace, work: Callable[..., None], *args: Any) -> None:
    """Runs a world of each size, and writes what there is after each."""
    sizes = {
        "rounds": options.rounds,
        "part_bytes": PART_BYTES,
        "parts_at_a_time": PARTS_AT_A_TIME,
        "request_bytes": REQUEST_BYTES,
        "requests_at_a_time": REQUESTS_AT_A_TIME,
        "packages": installed_versions(),
    }
    for world_size in options.processes:
        results |= run_worlds(work, [world_size], options.directory, options, *args)
        write_results("remote", sizes=sizes, results=results)


if __name__ == "__main__":
    main()
