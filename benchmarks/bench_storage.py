"""Saves and loads of files: ours and stock DCP's, as multiples of the raw system calls on the same bytes.

    python benchmarks/bench_storage.py

Every process holds its share of a state: 512 MB in 120 tensors, or 4,000 tensors of 2 KiB. Contenders take turns, round
by round; a time is the slowest process's, and a ratio is one of minima over the rounds. Raw are `pwritev` (and `fsync`)
of the tensors into one file per process, and `preadv` of that file into the tensors; for rows -> columns a call per
wanted run of 8 KiB. "Files only" is the storage writer or reader alone on a plan that was made before, without
collectives: what this package's storage costs; the rest is the planner's and DCP's. Files lie in the directory given by
--directory. Writes results/storage_<machine>.json.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from result_file import write_results
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext.storage import FileReader, FileWriter

MAX_PIECES = 1024  # IOV_MAX
Contenders = dict[str, Callable[[], Any]]
WORKLOADS = {"120 x 4.3 MB": (120, (1024, 1066)), "4,000 x 2 KiB": (4000, (16, 32))}


def sharded(workload: str, mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    count, shape = WORKLOADS[workload]
    local = list(shape)
    local[dim] //= mesh.size()
    state = {}
    for index in range(count):
        part = torch.full(local, float(index))
        state[f"layers.{index}.weight"] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    return state


def memory_of(state: dict[str, DTensor]) -> list[np.ndarray]:
    return [tensor.to_local().numpy().reshape(-1).view(np.uint8) for tensor in state.values()]


def write_raw(path: Path, parts: list[np.ndarray], sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    offset = 0
    for first in range(0, len(parts), MAX_PIECES):
        pieces = [memoryview(part) for part in parts[first : first + MAX_PIECES]]
        while pieces:
            done = os.pwritev(descriptor, pieces, offset)
            offset += done
            while pieces and done >= len(pieces[0]):
                done -= len(pieces.pop(0))
            if pieces and done:
                pieces[0] = pieces[0][done:]
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, parts: list[np.ndarray]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    offset = 0
    for first in range(0, len(parts), MAX_PIECES):
        pieces = [memoryview(part) for part in parts[first : first + MAX_PIECES]]
        while pieces:
            done = os.preadv(descriptor, pieces, offset)
            assert done > 0
            offset += done
            while pieces and done >= len(pieces[0]):
                done -= len(pieces.pop(0))
            if pieces and done:
                pieces[0] = pieces[0][done:]
    os.close(descriptor)


def slowest(function: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(contenders: Contenders, num_rounds: int, before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Of each contender the least time over the rounds, and its ratio to the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(num_rounds + 1):
        for name, function in contenders.items():
            before()
            spent = slowest(function)
            if index > 0:  # the first round warms up
                seconds[name].append(spent)
    limit = min(next(iter(seconds.values())))
    return {
        name: {"seconds": round(min(spent), 4), "ratio": round(min(spent) / limit, 2)}
        for name, spent in seconds.items()
    }


class OnlyFiles:
    """The storage calls of a save or load, on a plan that was made before."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def save(self, path: Path, sync: bool) -> Callable[[], None]:
        planner = DefaultSavePlanner()
        planner.set_up_planner(self.state, is_coordinator=True)
        local = planner.create_local_plan()
        (plan,), metadata = planner.create_global_plan([local])
        planner.finish_plan(plan)

        def run() -> None:
            writer = FileWriter(path, sync=sync, thread_count=1)
            writer.set_up_storage_writer(True)
            (prepared,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
            writer.finish(metadata, [writer.write_data(prepared, planner).wait()])

        return run

    def load(self, path: Path, verify: Any) -> Callable[[], None]:
        def run() -> None:
            reader = FileReader(path, verify, thread_count=1)
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, True)
            reader.read_data(self.plan(metadata), self.planner).wait()

        return run

    def plan(self, metadata: Any) -> Any:
        if not hasattr(self, "_plan"):
            self.planner = DefaultLoadPlanner()
            self.planner.set_up_planner(self.state, metadata, True)
            self._plan = self.planner.finish_plan(
                self.planner.create_global_plan([self.planner.create_local_plan()])[0]
            )
        return self._plan


def save_with(state: dict[str, Any], writer: StorageWriter, is_ours: bool) -> None:
    dcp.save(state, storage_writer=writer, planner=tte.SavePlanner() if is_ours else DefaultSavePlanner())


def load_with(state: dict[str, Any], reader: StorageReader, is_ours: bool) -> None:
    dcp.load(state, storage_reader=reader, planner=tte.LoadPlanner() if is_ours else DefaultLoadPlanner())


def measure_saves(state: dict[str, Any], folder: Path, sync: bool, num_rounds: int) -> dict[str, Any]:
    raw = folder / f"raw{dist.get_rank()}"
    parts = memory_of(state)
    alone = {name: tensor.to_local() for name, tensor in state.items()}
    contenders: Contenders = {
        "raw writev": lambda: write_raw(raw, parts, sync),
        "ours": lambda: save_with(state, FileWriter(folder / "ours", sync=sync, thread_count=1), True),
        "ours, files only": OnlyFiles(alone).save(folder / f"alone{dist.get_rank()}", sync),
        "DCP": lambda: save_with(state, FileSystemWriter(folder / "stock", sync_files=sync), False),
    }

    def remove() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in list(folder.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    return compare(contenders, num_rounds, remove)


def write_sources(state: dict[str, Any], folder: Path) -> None:
    save_with(state, FileWriter(folder / "ours", sync=False), True)
    save_with(state, FileSystemWriter(folder / "stock", sync_files=False), False)
    write_raw(folder / f"raw{dist.get_rank()}", memory_of(state), False)
    alone = {name: tensor.to_local() for name, tensor in state.items()}
    OnlyFiles(alone).save(folder / f"alone{dist.get_rank()}", False)()


def measure_loads(state: dict[str, Any], folder: Path, num_rounds: int) -> dict[str, Any]:
    parts = memory_of(state)
    rank = dist.get_rank()
    alone = OnlyFiles({name: tensor.to_local() for name, tensor in state.items()})
    contenders: Contenders = {
        "raw preadv": lambda: read_raw(folder / f"raw{rank}", parts),
        "ours, unverified": lambda: load_with(state, FileReader(folder / "ours", "none", thread_count=1), True),
        "ours, verified": lambda: load_with(state, FileReader(folder / "ours", thread_count=1), True),
        "ours, files only, unverified": alone.load(folder / f"alone{rank}", "none"),
        "ours, files only, verified": alone.load(folder / f"alone{rank}", "auto"),
        "ours, stock's files": lambda: load_with(state, FileReader(folder / "stock", thread_count=1), True),
        "DCP": lambda: load_with(state, FileSystemReader(folder / "stock"), False),
    }
    return compare(contenders, num_rounds)


def read_columns_raw(folder: Path, columns: dict[str, DTensor], world_size: int) -> None:
    """Each rank's columns from every rank's rows, a call per run."""
    rank = dist.get_rank()
    for source in range(world_size):
        descriptor = os.open(folder / f"raw{source}", os.O_RDONLY)
        base = 0
        for tensor in columns.values():
            local = tensor.to_local().numpy()
            num_rows, row_bytes = local.shape[0] // world_size, local.nbytes // local.shape[0]
            for row in range(num_rows):
                run = memoryview(local[source * num_rows + row].view(np.uint8))
                os.preadv(descriptor, [run], base + (row * world_size + rank) * row_bytes)
            base += num_rows * world_size * row_bytes
        os.close(descriptor)


def measure_columns(mesh: DeviceMesh, folder: Path, num_rounds: int) -> dict[str, Any]:
    """512 MB saved by rows, loaded by columns: runs of 8 KiB."""
    shape, count = (512, 2048 * mesh.size()), 120 // mesh.size()
    rows = {}
    for index in range(count):
        part = torch.full((shape[0] // mesh.size(), shape[1]), float(index))
        rows[f"{index}"] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    write_sources(rows, folder)
    columns = {
        name: DTensor.from_local(torch.zeros(shape[0], 2048), mesh, [Shard(1)], run_check=False) for name in rows
    }
    contenders: Contenders = {
        "raw preadv of the same runs": lambda: read_columns_raw(folder, columns, mesh.size()),
        "ours, unverified": lambda: load_with(columns, FileReader(folder / "ours", "none", thread_count=1), True),
        "ours, verified": lambda: load_with(columns, FileReader(folder / "ours", thread_count=1), True),
        "DCP": lambda: load_with(columns, FileSystemReader(folder / "stock"), False),
    }
    return compare(contenders, num_rounds)


def run(rank: int, world_size: int, folder: Path, num_rounds: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))

    def record(case: str, contenders: dict[str, Any]) -> None:
        if rank == 0:
            results[case] = contenders
            print(f"\n{case}")
            for name, row in contenders.items():
                print(f"  {name:32} {row['seconds'] * 1e3:9.1f} ms {row['ratio']:8.2f}", flush=True)

    for workload in WORKLOADS:
        state = sharded(workload, mesh, 0)
        name = f"{world_size} processes, {workload}"
        place = folder / "files"
        for sync in (False, True):
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
            dist.barrier()
            case = f"{name}, save {'with' if sync else 'without'} fsync"
            record(case, measure_saves(state, place, sync, num_rounds))
        write_sources(state, place)
        record(f"{name}, warm load", measure_loads(state, place, num_rounds))
    if world_size > 1:
        del state
        record(f"{world_size} processes, rows -> columns, runs of 8 KiB", measure_columns(mesh, place, num_rounds))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    with mp.Manager() as manager:
        results = manager.dict()
        for world_size in arguments.processes:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
                mp.spawn(run, (world_size, Path(folder), arguments.rounds, results), nprocs=world_size)
        measured = dict(results)
    sizes = {"rounds": arguments.rounds, "threads_per_process": 1, "file_system": file_system(arguments.directory)}
    print(write_results("storage", sizes=sizes, results=measured))


def file_system(directory: str) -> str:
    """The type of the file system that a directory lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = os.path.realpath(directory)
    inside = [(len(point), kind) for point, kind in mounts if os.path.commonpath([point, path]) == point]
    return max(inside)[1]


if __name__ == "__main__":
    main()
