"""Draws the pictures of docs/use/command_line.md, tutorial.md and moves.md: python docs/make_pictures.py.

Layouts are those of the package."""

from itertools import product
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torchtitan_ext.cli.picture import plot_holders
from torchtitan_ext.layout import local_shard
from torchtitan_ext.layout.layout import Box

FOLDER = Path(__file__).parent / "pictures"
GREY = "#7d838a"  # as in the other pictures


def holders(shape: tuple[int, int], mesh: tuple[int, int], steps: list[tuple[int, int, int]]) -> dict[int, list[Box]]:
    """The shards of all ranks; steps are (mesh axis, tensor dim, blocks), as in ``ShardOrder``."""
    found = {}
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        shard = local_shard(shape, mesh, steps, coordinate)
        found[rank] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in shard.chunks]
    return found


def draw_layouts() -> None:
    shape = (6144, 4096)
    title = "attention.wqkv.weight, 6144 x 4096\n8 ranks: dp 2 x tp 4, interleaved q, k and v: several boxes each"
    plot_holders(FOLDER / "layout-boxes.png", title, shape, files(holders(shape, (2, 4), [(1, 0, 3), (0, 0, 1)])))
    title = "model.0.weight, 1003 x 64, float32\nsaved by 2 ranks (dp 2)"
    shards = holders((1003, 64), (2,), [(0, 0, 1)])
    plot_holders(FOLDER / "tutorial-layout-2.png", title, (1003, 64), files(shards))


def files(held: dict[int, list[Box]]) -> list[tuple[str, Box]]:
    """Each box with the file that its rank writes."""
    return [(f"__{rank}_0.distcp", box) for rank, boxes in held.items() for box in boxes]


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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    draw_layouts()
    draw_transfer()
