"""Saves and loads of safetensors by several processes: ours, stock's writer and reader, safetensors, convert.

    python benchmarks/bench_hf.py --directory <on a disk> [--gigabytes 0.5] [--processes 1 2 4] [--rounds 3]

A state of bfloat16 matrices, --gigabytes of all processes together, cut by rows or by columns (runs of 8 KiB). Raw are
pwritev and preadv of the same runs, of all processes in one file that is there already (raw_runs.py). Contenders take
turns, round by round; a time is the slowest process's, a ratio one of minima over the rounds, to the fastest raw way.
Megabytes are the peak of resident memory beyond the state, of the process with most. Saves end when all is on the disk
("with fsync"; for stock and safetensors we sync their files), and once more for ours in the page cache; loads are of
files there. What is loaded is compared with what was saved. Writes results/hf_<machine>.json, unless --dry.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contest import Contenders, compare, print_rows
from measured_worlds import run_worlds
from raw_files import files_of, sync_files
from raw_runs import Runs, begins_in
from result_file import write_results
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from storage_states import COLUMNS, ROWS, Workload, check, clear, filled, large, local_parts
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.weights.writer import SafetensorsWriter

LAYOUTS = {"rows": ROWS, "columns": COLUMNS}
GOALS = {1: 1.3, 2: 1.3, 4: 1.5}
MEGABYTES = 64


class Case:
    """One layout of a state."""

    def __init__(self, workload: Workload, mesh: DeviceMesh, folder: Path, dim: int, num_rounds: int) -> None:
        self.workload = workload
        self.mesh = mesh
        self.folder = folder
        self.dim = dim
        self.num_rounds = num_rounds
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.state = filled(workload, mesh, dim)
        self.raw_file = folder / "raw"

    # ---- saves ----
    def measure_saves(self, sync: bool) -> dict[str, Any]:
        runs = Runs(local_parts(self.state), self.dim, self.rank, self.world_size)
        contenders: Contenders = {
            "raw pwritev": lambda: runs.write(self.raw_file, sync=sync),
            "ours, tte.save": lambda: self.save(sync),
            "gathered, save_file": lambda: self.gather_and_save(sync),
        }
        if sync:
            contenders |= {
                "tte.save, then convert": self.save_and_convert,
                "stock, with consolidation": lambda: self.save_by_stock(is_consolidated=True),
                "stock, a file per process": lambda: self.save_by_stock(is_consolidated=False),
            }
        return compare(contenders, self.num_rounds, before=lambda: self.make_folder(runs))

    def make_folder(self, runs: Runs) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            runs.make_file(self.raw_file)
        dist.barrier()

    def save(self, sync: bool) -> None:
        tte.save(self.state, storage_writer=SafetensorsWriter(self.folder / "ours", sync=sync))

    def save_and_convert(self) -> None:
        tte.save(self.state, self.folder / "dcp")
        if self.rank == 0:
            convert(open_source(self.folder / "dcp"), self.folder / "converted", to="safetensors", num_processes=1)
        dist.barrier()

    def save_by_stock(self, *, is_consolidated: bool) -> None:
        path = self.folder / "stock"
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=is_consolidated)
        writer.sync_files = False
        dcp.save(self.state, storage_writer=writer)
        self.sync(path, True)

    def gather_and_save(self, sync: bool) -> None:
        """What trainers do: full tensors, one after the other, kept by one process, which writes them."""
        whole = {}
        for name, tensor in self.state.items():
            full = tensor.full_tensor()
            if self.rank == 0:
                whole[name] = full
        path = self.folder / "gathered"
        if self.rank == 0:
            path.mkdir(exist_ok=True)
            save_file(whole, path / "model.safetensors")
        dist.barrier()
        self.sync(path, sync)

    def sync(self, path: Path, sync: bool) -> None:
        if sync:
            sync_files(files_of(path, self.rank, self.world_size))

    # ---- loads ----
    def measure_loads(self) -> dict[str, Any]:
        saved = filled(self.workload, self.mesh, ROWS)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        tte.weights.save(saved, self.folder / "ours")
        writer = HuggingFaceStorageWriter(str(self.folder / "stock"), save_distributed=True, enable_consolidation=True)
        dcp.save(saved, storage_writer=writer)
        del saved
        dist.barrier()
        (file,) = (self.folder / "ours").glob("*.safetensors")
        runs = Runs(local_parts(self.state), self.dim, self.rank, self.world_size, begins_in(file))
        contenders: Contenders = {"raw preadv": lambda: runs.read(file)}
        if self.dim == COLUMNS:
            contenders["raw preadv, whole rows"] = lambda: runs.read_windows(file)
        contenders |= {
            "ours, tte.load": lambda: tte.load(self.state, self.folder / "ours"),
            "stock": lambda: dcp.load(self.state, storage_reader=HuggingFaceStorageReader(str(self.folder / "stock"))),
            "safe_open, slices": partial(self.load_slices, file),
            "load_file": partial(self.load_whole, file),
        }
        return compare(
            contenders,
            self.num_rounds,
            before_first=lambda: clear(self.state),
            after_first=lambda: check(self.workload, self.mesh, self.dim, self.state),
        )

    def load_slices(self, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            for name, part in local_parts(self.state).items():
                part.copy_(opened.get_slice(name)[self.own(part)])

    def load_whole(self, file: Path) -> None:
        whole = load_file(file)
        for name, part in local_parts(self.state).items():
            part.copy_(whole[name][self.own(part)])

    def own(self, part: torch.Tensor) -> tuple[slice, ...]:
        begin = self.rank * part.shape[self.dim]
        return (slice(None),) * self.dim + (slice(begin, begin + part.shape[self.dim]),)


def run(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    workload = large(options.gigabytes, torch.bfloat16, world_size)
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"

    def record(title: str, measure: Callable[[], dict[str, Any]]) -> None:
        rows = measure()
        if rank == 0:
            results[f"{processes}, {title}"] = rows
            print_rows(f"{processes}, {title}", rows)
            for name, row in rows.items():
                if not name.startswith("ours"):
                    continue
                if row.get("ratio", 0) > GOALS.get(world_size, 1.5) or row.get("megabytes", 0) > MEGABYTES:
                    print(f"  misses the goal: {GOALS.get(world_size, 1.5)}, {MEGABYTES} MB")

    for layout in options.layouts if world_size > 1 else options.layouts[:1]:
        case = Case(workload, mesh, folder / "files", LAYOUTS[layout], options.rounds)
        if "saves" in options.steps:
            record(f"save with fsync, {layout}", lambda case=case: case.measure_saves(True))  # type: ignore[misc]
            record(f"save without fsync, {layout}", lambda case=case: case.measure_saves(False))  # type: ignore[misc]
        if "loads" in options.steps:
            record(f"load, {layout}", case.measure_loads)
        del case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", nargs="*", choices=("saves", "loads"), default=["saves", "loads"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="write no result file")
    options = parser.parse_args()
    measured = run_worlds(run, options.processes, options.directory, options)
    if not options.dry:
        sizes = {name: getattr(options, name) for name in ("gigabytes", "processes", "rounds")}
        print(write_results("hf", sizes={**sizes, "cores": os.cpu_count()}, results=measured))


if __name__ == "__main__":
    main()
