"""Memory that a dry run foretells against what real ranks take: the resident peak on the host, beside the state.

    python benchmarks/bench_dry_run_memory.py             2 and 4 gloo processes, 256 MiB of tensors each

Each process makes a state, asks `tte.dry_run`, and then saves or loads it; a row has the rank that takes most, foretold
and measured. A small save and load come first, so that modules are imported and threads have started. Files are not
synced. Tensors are on the CPU.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import first_call
from measured_worlds import run_worlds
from result_file import write_results
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import torchtitan_ext as tte

State = dict[str, Any]

NUM_LARGE, NUM_SMALL = 32, 8000
SMALL_WIDTH = 256
VALUE_BYTES = 2 << 20
WARM_BYTES = 4 << 20


def matrices(
    mesh: DeviceMesh, shape: tuple[int, int], count: int, placement: Placement, dtype: torch.dtype = torch.float32
) -> State:
    """Matrices of which each rank holds this shape."""
    local = [torch.full(shape, float(index), dtype=dtype) for index in range(count)]
    return {
        f"layers.{index}.weight": DTensor.from_local(part, mesh, [placement], run_check=False)
        for index, part in enumerate(local)
    }


def transposed_in_memory(state: State) -> State:
    """The same tensors, whose elements lie column by column."""
    return {
        name: DTensor.from_local(
            tensor.to_local().t().contiguous().t(), tensor.device_mesh, tensor.placements, run_check=False
        )
        for name, tensor in state.items()
    }


def with_values(state: State, num_bytes: int) -> State:
    """With byte strings beside the tensors, which one of the ranks writes."""
    values = {str(index): bytes([index % 256]) * VALUE_BYTES for index in range(num_bytes // VALUE_BYTES)}
    return {**state, "values": values}


class World:
    """Measures on the ranks of this world, and keeps the rows. All methods are collective."""

    def __init__(self, folder: Path, rank_bytes: int) -> None:
        self.folder = folder
        self.rank_bytes = rank_bytes
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.rows: list[dict[str, Any]] = []

    def large(self, placement: Placement, dtype: torch.dtype = torch.float32) -> State:
        """As many bytes as were asked for, in squares of float32, or as many elements."""
        side = int((self.rank_bytes / NUM_LARGE / 4) ** 0.5)
        return matrices(self.mesh, (side, side), NUM_LARGE, placement, dtype)

    def columns(self) -> State:
        """What was saved by rows, by columns."""
        size = dist.get_world_size()
        side = int((self.rank_bytes / NUM_LARGE / 4) ** 0.5) // size * size
        return matrices(self.mesh, (side * size, side // size), NUM_LARGE, Shard(1))

    def small(self) -> State:
        return matrices(self.mesh, (1, SMALL_WIDTH), NUM_SMALL, Shard(0))

    def measure(self) -> None:
        self.save("rows", self.large(Shard(0)))
        self.save("rows, transposed in memory", transposed_in_memory(self.large(Shard(0))))
        self.save("replicas", self.large(Replicate()))
        self.save("8,000 small tensors", self.small())
        self.save("half of it values", with_values(self.large(Shard(0)), self.rank_bytes))
        self.load("rows", "rows", self.large(Shard(0)))
        self.load("columns", "rows", self.columns())
        self.load("rows, transposed in memory", "rows", transposed_in_memory(self.large(Shard(0))))
        self.load("float64 from float32", "rows", self.large(Shard(0), torch.float64))
        self.load("8,000 small tensors", "8,000 small tensors", self.small())
        self.load("half of it values", "half of it values", with_values(self.large(Shard(0)), self.rank_bytes))
        stock = FileSystemWriter(self.folder / "stock", sync_files=False)
        tte.save(self.large(Shard(0)), storage_writer=stock)
        self.load("rows, stock's files", "stock", self.large(Shard(0)))

    def warm_up(self) -> None:
        state = with_values(matrices(self.mesh, (1024, 256), 4, Shard(0)), WARM_BYTES)
        for _ in range(2):
            tte.save(state, self.folder / "warm")
            tte.dry_run(state, checkpoint=self.folder / "warm")
            tte.load(state, self.folder / "warm")

    def save(self, name: str, state: State) -> None:
        ranks = tte.dry_run(state).save.ranks
        writer = tte.FileWriter(self.folder / name, sync=False)
        self._note("save", name, ranks, lambda: tte.save(state, storage_writer=writer))

    def load(self, name: str, saved: str, state: State) -> None:
        found = tte.dry_run(state, checkpoint=self.folder / saved)
        assert found.load is not None and not found.problems, found
        self._note("load", name, found.load.ranks, lambda: tte.load(state, self.folder / saved))

    def _note(self, kind: str, name: str, ranks: Any, act: Callable[[], Any]) -> None:
        foretold = max(one.buffer_bytes for one in ranks)
        row = first_call(act)
        if "failed" in row:
            raise RuntimeError(row["failed"])
        measured = int(row["megabytes"] * 1e6)
        self.rows.append(
            {
                "world_size": dist.get_world_size(),
                "kind": kind,
                "case": name,
                "state_bytes": ranks[0].state_bytes,
                "predicted_bytes": foretold,
                "measured_bytes": measured,
                "predicted / measured": round(foretold / max(measured, 1), 2),
            }
        )


def run(rank: int, world_size: int, folder: Path, rank_bytes: int, results: Any) -> None:
    world = World(folder, rank_bytes)
    world.warm_up()
    world.measure()
    if rank == 0:
        results[f"{world_size} ranks"] = world.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--mebibytes", type=int, default=256, help="of tensors of each rank")
    options = parser.parse_args()
    measured = run_worlds(run, options.processes, options.directory, options.mebibytes << 20)
    rows = [row for of_world in measured.values() for row in of_world]
    for row in rows:
        print(
            f"{row['world_size']} ranks  {row['kind']}  {row['case']:<28}"
            f"{row['predicted_bytes'] / 1e6:8.1f} MB foretold"
            f"{row['measured_bytes'] / 1e6:8.1f} MB taken{row['predicted / measured']:8.2f}"
        )
    written = write_results("dry_run_memory", sizes={"mebibytes_per_rank": options.mebibytes}, results={"rows": rows})
    print(f"\nwritten: benchmarks/results/{written.name}")


if __name__ == "__main__":
    main()
