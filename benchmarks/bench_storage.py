"""Saves and loads of files: ours, stock DCP's and other libraries', as multiples of the raw system calls.

    python benchmarks/bench_storage.py --directory <on a disk>

A state has --gigabytes (of all processes together) in 120 tensors, or 4,000 tensors of 2 KiB (--small). Contenders take
turns, round by round; a time is the slowest process's, and a ratio is one of minima over the rounds, to the fastest raw
way. Raw are system calls on the same bytes, with a file and as many threads per process as ours (raw_files.py). "Files
only" is our storage writer or reader alone, on a plan that was made before and without collectives; the rest is
planning. Megabytes are the peak of resident memory beyond the state.

So that all of it takes minutes, only the first size in the first dtype meets the peers and cold loads, and --rounds
rounds; the other sizes run in the first dtype, the other dtypes in the first size, and with the small tensors, whose
peers run with the first number of processes, in half as many rounds. Writes results/storage_<machine>.json;
storage_table.py makes tables of it.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import raw_files
import torch
import torch.distributed as dist
from contest import Contenders, compare, print_rows
from measured_worlds import run_worlds
from result_file import write_results
from storage_contenders import (
    PEERS,
    OnlyFiles,
    Ours,
    Peer,
    installed_versions,
    load_with_dcp,
    make_peers,
    save_with_dcp,
)
from storage_states import COLUMNS, ROWS, State, Workload, check, clear, filled, large, local_parts, small
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLD_THREADS = 4
STEPS = ("save without fsync", "save with fsync", "warm load", "cold load", "rows -> columns")


class Case:
    """One state on one mesh: what is measured of it, in the order of the methods."""

    def __init__(
        self, workload: Workload, mesh: DeviceMesh, folder: Path, peers: list[Peer], num_rounds: int, num_threads: int
    ) -> None:
        self.workload = workload
        self.mesh = mesh
        self.folder = folder
        self.peers = peers
        self.num_rounds = num_rounds
        self.num_threads = num_threads
        self.ours = Ours(num_threads)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.raw = folder / "raw"
        self.state = filled(workload, mesh, ROWS)
        self.parts = raw_files.bytes_of(local_parts(self.state))

    def measure_saves(self, sync: bool) -> dict[str, Any]:
        folder, write = self.folder, partial(raw_files.write, sync=sync, num_threads=self.num_threads)
        only_files = OnlyFiles(self.state, self.ours)
        contenders: Contenders = {"raw writev": lambda: write(self._raw_file(self.rank), self.parts)}
        if sync:
            contenders["raw writev, early write-back"] = lambda: write(
                self._raw_file(self.rank), self.parts, write_back=True
            )
        contenders |= {
            "ours, files only": lambda: only_files.save(folder / f"alone{self.rank}", sync),
            "ours, tte.save": lambda: self.ours.save(self.state, folder / "ours", sync),
            "ours, dcp.save": lambda: self.ours.save_by_dcp(self.state, folder / "ours", sync),
            "DCP": lambda: save_with_dcp(self.state, folder / "dcp", sync),
        }
        contenders |= {peer.name: partial(peer.save, self.state, folder / peer.name, sync) for peer in self.peers}
        return compare(contenders, self.num_rounds, before=self.remove_files)

    def remove_files(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.raw.mkdir(parents=True)
        dist.barrier()

    def write_sources(self) -> None:
        """What loads read: all synced, so that no write-back runs beside them."""
        self.remove_files()
        raw_files.write(self._raw_file(self.rank), self.parts, sync=True, num_threads=1)
        self.ours.save(self.state, self.folder / "ours", True)
        save_with_dcp(self.state, self.folder / "dcp", True)
        for peer in self.peers:
            if peer.load is not None:
                peer.save(self.state, self.folder / peer.name, True)
        dist.barrier()

    def measure_warm_loads(self) -> dict[str, Any]:
        raw = lambda: raw_files.read(self._raw_file(self.rank), self.parts, num_threads=self.num_threads)  # noqa: E731
        contenders = {"raw preadv": raw, **self._loads(self.ours, self.state, self.peers)}
        return self._compare_loads(contenders, self.state, ROWS)

    def measure_cold_loads(self) -> dict[str, Any]:
        """Also with several threads: a disk likes several requests at once."""
        contenders: Contenders = {}
        counts = {"": self.num_threads, f", {COLD_THREADS} threads": COLD_THREADS}
        for suffix, num_threads in counts.items():
            for name, read in (("preadv", raw_files.read), ("O_DIRECT", raw_files.read_direct)):
                contenders[f"raw {name}{suffix}"] = partial(
                    read, self._raw_file(self.rank), self.parts, num_threads=num_threads
                )
        for suffix, num_threads in counts.items():
            loads = self._loads(Ours(num_threads), self.state, [])
            contenders |= {name + suffix: loads[name] for name in ("ours, files only, unverified", "ours, tte.load")}
        loads = self._loads(self.ours, self.state, self.peers)
        contenders |= {name: load for name, load in loads.items() if not name.startswith("ours")}
        return self._compare_loads(contenders, self.state, ROWS, before=self._drop_from_cache)

    def measure_columns(self) -> dict[str, Any]:
        """Saved by rows, loaded by columns."""
        columns = filled(self.workload, self.mesh, COLUMNS)
        sources = [self._raw_file(rank) for rank in range(self.world_size)]
        parts = local_parts(columns)
        contenders: Contenders = {
            "raw preadv, a call per run": lambda: raw_files.read_columns(sources, parts, self.rank),
            "raw preadv, whole rows": lambda: raw_files.read_columns_by_rows(sources, parts, self.rank),
        }
        contenders |= self._loads(self.ours, columns, [peer for peer in self.peers if peer.reshards])
        return self._compare_loads(contenders, columns, COLUMNS)

    def _raw_file(self, rank: int) -> Path:
        return self.raw / f"rank{rank}"

    def _loads(self, ours: Ours, state: State, peers: list[Peer]) -> Contenders:
        path, only_files = self.folder / "ours", OnlyFiles(state, ours)
        contenders: Contenders = {
            "ours, files only, unverified": lambda: only_files.load(path, "none"),
            "ours, files only": lambda: only_files.load(path, "auto"),
            "ours, tte.load, unverified": lambda: ours.load(state, path, "none"),
            "ours, tte.load": lambda: ours.load(state, path, "auto"),
            "ours, dcp.load": lambda: ours.load_by_dcp(state, path, "auto"),
            "ours, tte.load of DCP's files": lambda: ours.load(state, self.folder / "dcp", "auto"),
            "DCP": lambda: load_with_dcp(state, self.folder / "dcp"),
        }
        return contenders | {
            peer.name: partial(peer.load, state, self.folder / peer.name) for peer in peers if peer.load is not None
        }

    def _compare_loads(self, contenders: Contenders, state: State, dim: int, **options: Any) -> dict[str, Any]:
        return compare(
            contenders,
            self.num_rounds,
            before_first=lambda: clear(state),
            after_first=lambda: check(self.workload, self.mesh, dim, state),
            **options,
        )

    def _drop_from_cache(self) -> None:
        dist.barrier()
        raw_files.drop_from_cache(raw_files.files_of(self.folder, self.rank, self.world_size))
        dist.barrier()


def measure(case: Case, name: str, results: Any, *, steps: Sequence[str]) -> None:
    def record(step: str, measure_step: Callable[[], dict[str, Any]]) -> None:
        if step not in steps:
            return
        rows = measure_step()
        if case.rank == 0:
            results[f"{name}, {step}"] = rows
            print_rows(f"{name}, {step}", rows)

    record("save without fsync", lambda: case.measure_saves(False))
    record("save with fsync", lambda: case.measure_saves(True))
    case.write_sources()
    record("warm load", case.measure_warm_loads)
    record("cold load", case.measure_cold_loads)
    if case.world_size > 1:
        record("rows -> columns", case.measure_columns)
    case.remove_files()


def states(options: argparse.Namespace) -> list[tuple[float, str]]:
    """Each size in the first dtype, then the other dtypes in the first size."""
    sizes = [(gigabytes, options.dtype[0]) for gigabytes in options.gigabytes]
    return sizes + [(options.gigabytes[0], dtype) for dtype in options.dtype[1:] if options.gigabytes]


def run(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    peers = make_peers(options.peers)
    fewer_rounds = max(2, options.rounds // 2)
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    files = folder / "files"
    # One after the other: a state is let go before the next is made.
    for index, (gigabytes, dtype) in enumerate(states(options)):
        workload = large(gigabytes, DTYPES[dtype], world_size)
        name = f"{processes}, {gigabytes:g} GB {dtype}"
        if index == 0:
            case = Case(workload, mesh, files, peers, options.rounds, options.threads)
            measure(case, name, results, steps=STEPS)
        else:
            case = Case(workload, mesh, files, [], fewer_rounds, options.threads)
            measure(case, name, results, steps=[step for step in STEPS if step != "cold load"])
        del case
    if options.small:
        asked = peers if world_size == options.processes[0] else []
        case = Case(small(DTYPES[options.dtype[0]]), mesh, files, asked, fewer_rounds, options.threads)
        measure(case, f"{processes}, 4,000 x 2 KiB", results, steps=["save with fsync", "warm load", "rows -> columns"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[0.5, 2.0])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="beside DCP as it is")
    parser.add_argument("--threads", type=int, default=1, help="of each process, raw and ours")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=True, help="4,000 small tensors")
    options = parser.parse_args()
    if not options.gigabytes and not options.small:
        parser.error("nothing to measure: give --gigabytes or --small")
    measured = run_worlds(run, options.processes, options.directory, options)
    sizes = {
        "rounds": options.rounds,
        "threads_per_process": options.threads,
        "file_system": file_system(options.directory),
        "peers": installed_versions(options.peers),
    }
    print(write_results("storage", sizes=sizes, results=measured))


def file_system(directory: str) -> str:
    """The type of the file system that a directory lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = os.path.realpath(directory)
    inside = [(len(point), kind) for point, kind in mounts if os.path.commonpath([point, path]) == point]
    return max(inside)[1]


if __name__ == "__main__":
    main()
