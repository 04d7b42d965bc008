"""Draws the pictures of docs/use/command_line.md and docs/use/tutorial.md: python docs/make_pictures.py.

Layouts are those of the package, data made up."""

import random
from itertools import product
from math import prod
from pathlib import Path

from torchtitan_ext.cli.pictures.holders import Holder
from torchtitan_ext.cli.pictures.plots import plot_bytes, plot_differences, plot_layout
from torchtitan_ext.layout import local_shard

FOLDER = Path(__file__).parent / "pictures"


def holders(shape: tuple[int, int], mesh: tuple[int, int], steps: list[tuple[int, int, int]]) -> list[Holder]:
    """The shards of all ranks; steps are (mesh axis, tensor dim, blocks), as in ``ShardOrder``."""
    found = []
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        shard = local_shard(shape, mesh, steps, coordinate)
        found.append(Holder(rank, tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in shard.chunks)))
    return found


def draw_layouts() -> None:
    tp_then_dp = [(1, 0, 1), (0, 0, 1)]
    for mesh, rows in (((4, 2), 50257), ((64, 8), 128257)):
        title = f"output.weight, {rows} x 4096\n{prod(mesh)} ranks: dp {mesh[0]} x tp {mesh[1]}, both on dim 0, uneven"
        shards = holders((rows, 4096), mesh, tp_then_dp)
        plot_layout(FOLDER / f"layout-{prod(mesh)}.png", title, (rows, 4096), shards, holder="rank")
    shape = (6144, 4096)
    title = "attention.wqkv.weight, 6144 x 4096\n8 ranks: dp 2 x tp 4, interleaved q, k and v: several boxes each"
    shards = holders(shape, (2, 4), [(1, 0, 3), (0, 0, 1)])
    plot_layout(FOLDER / "layout-boxes.png", title, shape, shards, holder="rank")
    title = "attention.wo.weight, 16384 x 16384\n512 ranks: dp 64 on dim 0, tp 8 on dim 1"
    shards = holders((16384, 16384), (64, 8), [(1, 1, 1), (0, 0, 1)])
    plot_layout(FOLDER / "layout-512-columns.png", title, (16384, 16384), shards, holder="rank")


def draw_tutorial() -> None:
    for num_ranks in (2, 3):
        title = f"model.0.weight, 1003 x 64, float32\nsaved by {num_ranks} ranks (dp {num_ranks})"
        shards = holders((1003, 64), (num_ranks,), [(0, 0, 1)])
        plot_layout(FOLDER / f"tutorial-layout-{num_ranks}.png", title, (1003, 64), shards, holder="rank")


def draw_bytes() -> None:
    draw = random.Random(0)
    before = [12_000_000_000 + draw.randrange(400_000_000) for _ in range(8)]
    after = [sum(before) // 512 + draw.randrange(20_000_000) for _ in range(512)]
    plot_bytes(FOLDER / "bytes-8-to-16.png", before, [one // 2 for one in before for _ in range(2)], title="step-1000")
    plot_bytes(FOLDER / "bytes-8-to-512.png", before, after, title="step-1000")


def draw_differences() -> None:
    counts = [[0] * 64 for _ in range(64)]
    counts[40][13] = 1
    title = "layers.0.attention.wq.weight, 4096 x 4096\n1 of 16,777,216 elements differs, at [2600, 871]"
    plot_differences(FOLDER / "difference-one.png", title, counts, sizes=(4096, 4096), cell_sizes=(64, 64), dims=(0, 1))
    draw = random.Random(0)
    counts = [[int(4096 * draw.random() ** 4) if row >= 48 else 0 for _ in range(64)] for row in range(64)]
    title = f"layers.0.attention.wq.weight, 4096 x 4096\n{sum(map(sum, counts)):,} of 16,777,216 elements differ"
    plot_differences(
        FOLDER / "difference-rank.png", title, counts, sizes=(4096, 4096), cell_sizes=(64, 64), dims=(0, 1)
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    draw_layouts()
    draw_tutorial()
    draw_bytes()
    draw_differences()
