"""The chunks that ranks hold of Llama 405B's tensors: ours against PyTorch's `_compute_local_shape_and_global_offset`.

    python benchmarks/bench_layout.py

Prints three tables and writes results/layout_<machine>.json:
  1. one tensor on one rank, by kind of placement and mesh;
  2. all 1,137 tensors, on one rank and on all ranks;
  3. one tensor on one rank as its dim grows.
Both sides start from plain values and placements; ours includes the conversion from Python to C++ and back. Every
distinct layout is timed and counted as often as the model has it. PyTorch's function is timed at a few coordinates, and
what it takes for all ranks is extrapolated from these, because it would take hours; ours is run for all ranks.
"""

import argparse
import functools
import itertools
import statistics
from collections import Counter
from typing import Any, Literal, NamedTuple

from llama_405b import DIM, Placements, list_tensors
from result_file import measure_seconds, write_results
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as stock_shape_and_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from torchtitan_ext import _core
from torchtitan_ext.layout.layout import LocalShard, local_shard

TP = 8
WORLD_SIZES = [64, 256, 1024, 4096, 8192]
DIM_LENGTHS = [2**exponent for exponent in (12, 15, 18, 21, 24)]
GROWING_MESH = (128, TP)
ROWS: Placements = ((0, TP), (0, 1))
Shape = tuple[int, ...]


class Layout(NamedTuple):
    shape: Shape
    mesh_shape: Shape
    placements: Placements

    def __str__(self) -> str:
        placements = "".join(str(placement) for placement in stock_placements(self.placements))
        return f"{'x'.join(map(str, self.shape))} {placements} on {'x'.join(map(str, self.mesh_shape))}"


def shard_of_rank(layout: Layout, coordinate: Shape, reading: Literal["nested", "left_to_right"]) -> LocalShard:
    steps = _core.read_placements(layout.placements, layout.mesh_shape, reading)
    return local_shard(layout.shape, layout.mesh_shape, steps, coordinate)


def shards_of_all_ranks(layout: Layout) -> list[Any]:
    steps = _core.read_placements(layout.placements, layout.mesh_shape, "nested")
    return _core.all_shards(layout.shape, layout.mesh_shape, steps)


def stock_placements(placements: Placements) -> tuple[Placement, ...]:
    return tuple(
        Replicate() if dim < 0 else Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        for dim, factor in placements
    )


def time_one_rank(layout: Layout, num_repeats: int) -> tuple[float, float]:
    """Seconds for one tensor on one rank, ours and stock's, each the mean over three coordinates."""
    placements, (dp, tp) = stock_placements(layout.placements), layout.mesh_shape
    ours, stock = [], []
    for coordinate in [(0, 0), (dp // 3, tp // 2), (dp - 1, tp - 1)]:
        check_same_question(layout, coordinate)
        run_ours = functools.partial(shard_of_rank, layout, coordinate, "nested")
        run_stock = functools.partial(
            stock_shape_and_offset, layout.shape, layout.mesh_shape, list(coordinate), placements
        )
        ours.append(measure_seconds(run_ours, num_repeats=num_repeats, num_calls=100))
        stock.append(measure_seconds(run_stock, num_repeats=num_repeats))
    return statistics.mean(ours), statistics.mean(stock)


def check_same_question(layout: Layout, coordinate: Shape) -> None:
    """Ours, read from left to right as stock reads, must have stock's local shape and first offset."""
    shard = shard_of_rank(layout, coordinate, "left_to_right")
    placements = stock_placements(layout.placements)
    sizes, offsets = stock_shape_and_offset(layout.shape, layout.mesh_shape, list(coordinate), placements)
    if shard.sizes != sizes or (shard.chunks and shard.chunks[0].offsets != offsets):
        raise SystemExit(f"bench_layout: {layout} at {coordinate}: got {shard}, stock has {sizes} at {offsets}")


def bench_tensors(counts: Counter[tuple[Shape, Placements]], num_repeats: int) -> list[dict[str, Any]]:
    """One row per distinct layout and world size."""
    print(f"{'one tensor on one rank':52} {'ours':>10} {'stock':>10} {'ratio':>8}")
    rows = []
    for world_size, (shape, placements) in itertools.product(WORLD_SIZES, counts):
        layout = Layout(shape, (world_size // TP, TP), placements)
        ours, stock = time_one_rank(layout, num_repeats)
        print(f"{layout!s:52} {ours * 1e6:7.1f} us {stock * 1e6:7.0f} us {stock / ours:8,.0f}")
        rows.append(
            {
                "world_size": world_size,
                "layout": str(layout),
                "num_tensors": counts[shape, placements],
                "ours_seconds": ours,
                "stock_seconds": stock,
                "all_ranks_seconds": measure_seconds(functools.partial(shards_of_all_ranks, layout), num_repeats=3),
            }
        )
    return rows


def sum_over_model(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(
        f"\n{'all 1,137 tensors':18} {'ours':>10} {'stock':>10} {'ratio':>8}   ours, all ranks   stock (extrapolated)"
    )
    sums = []
    for world_size in WORLD_SIZES:
        of_size = [row for row in rows if row["world_size"] == world_size]
        ours, stock, all_ranks = (
            sum(row["num_tensors"] * row[column] for row in of_size)
            for column in ("ours_seconds", "stock_seconds", "all_ranks_seconds")
        )
        stock_all = stock * world_size
        print(
            f"{world_size:10,} ranks {ours * 1e3:8.1f} ms {stock * 1e3:7.0f} ms {stock / ours:8,.0f}"
            f"   {all_ranks:13.2f} s   {stock_all:13,.0f} s"
        )
        sums.append(
            {
                "world_size": world_size,
                "one_rank_seconds": ours,
                "stock_one_rank_seconds": stock,
                "all_ranks_seconds": all_ranks,
                "stock_all_ranks_seconds_extrapolated": stock_all,
            }
        )
    return sums


def bench_growing_dim(num_repeats: int) -> list[dict[str, Any]]:
    print(f"\n{'rows of one tensor, strided on 128x8':52} {'ours':>10} {'stock':>10} {'ratio':>8}")
    rows = []
    for length in DIM_LENGTHS:
        layout = Layout((length, DIM), GROWING_MESH, ROWS)
        ours, stock = time_one_rank(layout, num_repeats)
        print(f"{length:52,} {ours * 1e6:7.1f} us {stock * 1e6:7.0f} us {stock / ours:8,.0f}")
        rows.append({"length": length, "ours_seconds": ours, "stock_seconds": stock})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="times are medians of this many (default: 7)")
    num_repeats = parser.parse_args().repeats
    tensors = list_tensors(TP)
    one_tensor = bench_tensors(Counter((tensor.shape, tensor.placements) for tensor in tensors), num_repeats)
    path = write_results(
        "layout",
        sizes={"model": "Llama 3.1 405B", "num_tensors": len(tensors), "tp": TP, "repeats": num_repeats},
        results={
            "one_tensor": one_tensor,
            "model": sum_over_model(one_tensor),
            "growing_dim": bench_growing_dim(num_repeats),
        },
    )
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
