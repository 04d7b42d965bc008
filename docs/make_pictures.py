"""Draws the pictures of docs/use/command_line.md, tutorial.md and moves.md: python docs/make_pictures.py.

Layouts are those of the package, data made up."""

import random
from itertools import product
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torchtitan_ext.cli.pictures.holders import Box, Holders
from torchtitan_ext.cli.pictures.plots import plot_bytes, plot_differences, plot_layout
from torchtitan_ext.layout import local_shard

FOLDER = Path(__file__).parent / "pictures"
GREY = "#7d838a"  # as in the other pictures


def holders(shape: tuple[int, int], mesh: tuple[int, int], steps: list[tuple[int, int, int]]) -> Holders:
    """The shards of all ranks; steps are (mesh axis, tensor dim, blocks), as in ``ShardOrder``."""
    found = {}
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        shard = local_shard(shape, mesh, steps, coordinate)
        found[rank] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in shard.chunks]
    return found


def draw_layouts() -> None:
    shape = (128257, 4096)
    title = "output.weight, 128257 x 4096\n512 ranks: dp 64 x tp 8, both on dim 0, uneven"
    shards = holders(shape, (64, 8), [(1, 0, 1), (0, 0, 1)])
    plot_layout(FOLDER / "layout-512.png", title, shape, shards, holder="rank")
    shape = (6144, 4096)
    title = "attention.wqkv.weight, 6144 x 4096\n8 ranks: dp 2 x tp 4, interleaved q, k and v: several boxes each"
    shards = holders(shape, (2, 4), [(1, 0, 3), (0, 0, 1)])
    plot_layout(FOLDER / "layout-boxes.png", title, shape, shards, holder="rank")


def draw_tutorial() -> None:
    for num_ranks in (2, 3):
        title = f"model.0.weight, 1003 x 64, float32\nsaved by {num_ranks} ranks (dp {num_ranks})"
        shards = holders((1003, 64), (num_ranks,), [(0, 0, 1)])
        plot_layout(FOLDER / f"tutorial-layout-{num_ranks}.png", title, (1003, 64), shards, holder="rank")


def draw_transfer() -> None:
    """Rows of ranks 0 to 3 become columns of ranks 4 and 5; each part has the colour of the rank that sends it."""
    shape = (10, 7)
    held = holders(shape, (4,), [(0, 0, 1)])
    wanted = holders(shape, (2,), [(0, 1, 1)])
    sent = [
        (common(boxes[0], others[0]), source, target + 4)
        for source, boxes in held.items()
        for target, others in wanted.items()
    ]
    colours = ScalarMappable(Normalize(0, 3), mpl.colormaps["cividis"])
    with mpl.rc_context({"text.color": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.titlecolor": GREY}):
        figure = Figure(figsize=(6.4, 3.4), dpi=150, layout="constrained", facecolor="none")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        parts = [(boxes[0], rank, f"rank {rank}") for rank, boxes in held.items()]
        draw_parts(left, shape, parts, colours, title="source: FSDP, rows of ranks 0 to 3")
        parts = [(box, source, f"{source} \N{RIGHTWARDS ARROW} {target}") for box, source, target in sent]
        draw_parts(right, shape, parts, colours, title="target: TP, columns of ranks 4 and 5")
        figure.savefig(FOLDER / "transfer.png")


def common(one: Box, other: Box) -> Box:
    """What two boxes have in common."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)]
    return offsets, tuple(end - offset for end, offset in zip(ends, offsets, strict=True))


def draw_parts(
    axes: Axes, shape: tuple[int, int], parts: list[tuple[Box, int, str]], colours: ScalarMappable, *, title: str
) -> None:
    axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0), facecolor="none")
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", size=9.0)
    for (offsets, sizes), rank, text in parts:
        axes.add_patch(
            Rectangle((offsets[1], offsets[0]), sizes[1], sizes[0], facecolor=colours.to_rgba(rank), edgecolor=GREY)
        )
        middle = offsets[1] + sizes[1] / 2, offsets[0] + sizes[0] / 2
        axes.text(*middle, text, color="white" if rank < 2 else "black", size=8.0, ha="center", va="center")
    axes.set_yticks(sorted({place for (offsets, sizes), *_ in parts for place in (offsets[0], offsets[0] + sizes[0])}))
    axes.set_xticks(sorted({place for (offsets, sizes), *_ in parts for place in (offsets[1], offsets[1] + sizes[1])}))


def draw_bytes() -> None:
    draw = random.Random(0)
    before = [12_000_000_000 + draw.randrange(400_000_000) for _ in range(8)]
    plot_bytes(FOLDER / "bytes-8-to-16.png", before, [one // 2 for one in before for _ in range(2)], title="step-1000")


def draw_differences() -> None:
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
    draw_transfer()
    draw_bytes()
    draw_differences()
