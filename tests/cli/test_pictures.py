"""Pictures: grids against a slow count of elements, drawings letter by letter, and what stands in the files."""

import random
import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import typer
from layouts import sharded_2d, strided
from matplotlib.image import imread

from torchtitan_ext.cli.pictures import plotter
from torchtitan_ext.cli.pictures.holders import (
    Box,
    Holders,
    Rectangle,
    bytes_of_ranks,
    cut_grid,
    holders_of,
    plane_of,
    text_of_ranks,
)
from torchtitan_ext.cli.pictures.plots import plot_bytes, plot_differences, plot_layout
from torchtitan_ext.cli.pictures.text import draw_layout

# ---- who holds what ----


def random_parts(seed: int) -> list[Rectangle]:
    """Rectangles that may overlap, as those of replicas do, and leave gaps."""
    draw = random.Random(seed)

    def span(size: int) -> tuple[int, int]:
        begin = draw.randrange(size)
        return begin, draw.randint(begin + 1, size)

    return [Rectangle(span(7), span(6), (rank,)) for rank in range(draw.randint(1, 6))]


@pytest.mark.parametrize("seed", range(30))
def test_each_cell_has_the_ranks_of_its_elements(seed: int) -> None:
    parts = random_parts(seed)
    grid = cut_grid(parts, max_rows=100, max_cols=100)
    for row, col in product(range(len(grid.row_cuts) - 1), range(len(grid.col_cuts) - 1)):
        rows, cols = range(*grid.row_cuts[row : row + 2]), range(*grid.col_cuts[col : col + 2])
        for place in product(rows, cols):
            holding = [
                part.ranks[0] for part in parts if place[0] in range(*part.rows) and place[1] in range(*part.cols)
            ]
            assert tuple(holding) == grid.ranks[row][col]


def test_of_many_rows_the_first_and_the_last_are_kept() -> None:
    parts = plane_of((100, 4), strided(100, 1, 100, 4)).parts
    grid = cut_grid(parts, max_rows=5, max_cols=5)
    assert grid.row_cuts == (0, 1, 2, 98, 99, 100)
    assert grid.elided_row == 2 and grid.elided_col is None
    assert [cells[0] for cells in grid.ranks] == [(0,), (1,), tuple(range(2, 98)), (98,), (99,)]


def test_the_two_dims_that_are_cut_most_are_drawn() -> None:
    boxes: list[Box] = [((0, row, col), (5, 1, 2)) for row in range(3) for col in (0, 2, 4)]
    holders = {rank: (box,) for rank, box in enumerate(boxes)}
    plane = plane_of((5, 3, 6), holders)
    assert plane.dims == (1, 2)
    assert not plane.is_cut_behind
    both = {**holders, 9: (((5, 0, 0), (5, 3, 6)),)}
    plane = plane_of((10, 3, 6), both)
    assert plane.is_cut_behind
    assert {rank for part in plane.parts for rank in part.ranks} == set(range(9))
    assert "another dim is cut as well" in draw_layout((10, 3, 6), both, width=80)


def test_replicas_and_empty_boxes() -> None:
    whole: Box = ((0, 0), (4, 4))
    holders = {0: (whole,), 1: (((4, 0), (0, 4)),), 2: (whole,)}
    assert plane_of((4, 4), holders).parts == [Rectangle((0, 4), (0, 4), (0, 2))]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4], "3-4"),
        ([0, 8], "0, 8"),
        (range(16), "0-15"),
        (range(0, 512, 8), "0-504 by 8"),
        ([0, 3, 5, 6, 7], "0, 3, 5-7"),
        ([0, 3, 5, 6, 7, 9], "0, 3, 5-7, ... 6 in all"),
    ],
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert text_of_ranks(ranks) == text


@pytest.mark.parametrize(
    ("names", "numbers", "word"),
    [
        (["__0_0.distcp", "__10_0.distcp", "__2_1.distcp", "__2_0.distcp"], [0, 2, 10], "rank"),
        (["sub/__1_0.0f3a.distcp"], [1], "rank"),
        (["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"], [0, 1], "file"),
        (["__0_0.distcp", "other.distcp"], [0, 1], "file"),
    ],
)
def test_ranks_by_files(names: list[str], numbers: list[int], word: str) -> None:
    boxes: list[tuple[str, Box]] = [(name, ((row,), (1,))) for row, name in enumerate(names)]
    holders, found = holders_of(boxes)
    assert (list(holders), found) == (numbers, word)
    assert sorted(box for held in holders.values() for box in held) == [box for _, box in boxes]


def test_bytes_by_files() -> None:
    assert bytes_of_ranks({"__0_0.distcp": 5, "__2_0.distcp": 7, "__2_1.distcp": 1}) == [5, 0, 8]
    assert bytes_of_ranks({"b.safetensors": 7, "a.safetensors": 5}) == [5, 7]
    assert bytes_of_ranks({}) == []


# ---- in characters ----


def test_a_drawing_of_two_axes() -> None:
    assert draw_layout((4096, 1024), sharded_2d(2, 2, 4096, 1024), width=80).splitlines() == [
        "dim 0 downwards, dim 1 to the right",
        "     0      512    1024",
        "   0 ┌──────┬──────┐",
        "     │  0   │  1   │",
        "2048 ├──────┼──────┤",
        "     │  2   │  3   │",
        "4096 └──────┴──────┘",
    ]


def test_cells_of_one_rank_have_no_line_between_them() -> None:
    holders = {
        0: (((0, 0), (4, 4)),),
        1: (((0, 4), (8, 4)),),
        2: (((4, 0), (4, 4)),),
    }
    assert draw_layout((8, 8), holders, width=80).splitlines()[2:] == [
        "0 ┌──────┬──────┐",
        "  │  0   │  1   │",
        "4 ├──────┤      │",
        "  │  2   │  1   │",
        "8 └──────┴──────┘",
    ]


def test_a_vector_of_several_boxes_per_rank() -> None:
    holders = {rank: (((rank,), (1,)), ((rank + 2,), (1,))) for rank in range(2)}
    lines = draw_layout((4,), holders, width=80).splitlines()
    assert [line.split()[1] for line in lines[1::2]] == ["0", "1", "0", "1"]
    assert [line.split()[0] for line in lines[::2]] == ["0", "1", "2", "3", "4"]


def test_a_single_number_and_nothing() -> None:
    assert draw_layout((), {0: (((), ()),)}, width=80).splitlines()[1].split() == ["│", "0", "│"]
    assert draw_layout((0, 4), {0: (((0, 0), (0, 4)),)}, width=80) == "no elements"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("shape", [(512, 1), (64, 8), (8, 64), (1, 512), (128, 64)])
def test_many_ranks_fit_the_terminal(shape: tuple[int, int], width: int) -> None:
    lines = draw_layout((8192, 8192), sharded_2d(*shape, 8192, 8192), width=width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 40
    assert str(shape[0] * shape[1] - 1) in lines[-2].split()


# ---- in files ----


def texts_of(path: Path) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.S)]


def test_a_layout_names_all_of_few_ranks(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    plot_layout(path, "w, 64 x 64", (64, 64), sharded_2d(4, 2, 64, 64), holder="file")
    texts = texts_of(path)
    # Once in its box, and once beside the ramp of colours.
    assert all(texts.count(str(rank)) >= 2 for rank in range(1, 8))
    assert {"w, 64 x 64", "dim 0", "dim 1", "file", "16", "32", "48", "64"} <= set(texts)


def test_of_many_ranks_some_are_named(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    plot_layout(path, "w", (16384, 16384), sharded_2d(64, 8, 16384, 16384), holder="rank")
    named = {int(text) for text in texts_of(path) if text.isdigit()} & set(range(512))
    assert 100 < len(named) < 300 and {rank % 8 for rank in named} == set(range(8))


def test_a_name_that_would_reach_into_another_colour_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    plot_layout(path, "w", (6144, 64), strided(512, 3, 6144, 64), holder="rank")
    texts = texts_of(path)
    assert "511" not in texts and sum(texts.count(str(rank)) == 3 for rank in range(512)) > 5


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_layout(tmp_path / name, "w", (8, 8), sharded_2d(2, 2, 8, 8), holder="rank")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_page_shows_through(tmp_path: Path) -> None:
    plot_layout(tmp_path / "layout.png", "w", (8, 8), sharded_2d(2, 2, 8, 8), holder="rank")
    pixels = imread(tmp_path / "layout.png")
    assert pixels[0, 0, 3] == 0 and pixels[..., 3].max() == 1


@pytest.mark.parametrize("holders", [{0: (((0, 0), (0, 4)),)}, {0: (((0, 0), (4, 4)),), 1: (((0, 0), (4, 4)),)}])
def test_layouts_without_a_cut(holders: Holders, tmp_path: Path) -> None:
    plot_layout(tmp_path / "layout.svg", "w", (4, 4), holders, holder="rank")
    assert "w" in texts_of(tmp_path / "layout.svg")


def test_a_single_number_has_a_picture(tmp_path: Path) -> None:
    plot_layout(tmp_path / "layout.svg", "step", (), {0: (((), ()),)}, holder="rank")
    assert "0" in texts_of(tmp_path / "layout.svg")


def test_bytes_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "bytes.svg"
    plot_bytes(path, [2_000_000] * 4, [1_000_000] * 7 + [500_000], title="llama")
    texts = texts_of(path)
    assert {"llama", "before: 4 ranks, 2 MB each", "after: 8 ranks, 500 kB to 1 MB, 938 kB on average"} <= set(texts)


def test_bars_too_low_to_see_have_their_own_scale(tmp_path: Path) -> None:
    path = tmp_path / "bytes.svg"
    plot_bytes(path, [8_000_000_000] * 8, [125_000_000] * 512, title="llama")
    texts = texts_of(path)
    assert "after: 512 ranks, 125 MB each (its own scale)" in texts
    assert any(text.endswith(" GB") for text in texts) and any(text.endswith("0 MB") for text in texts)


def test_bytes_of_many_ranks_and_of_one_side(tmp_path: Path) -> None:
    path = tmp_path / "bytes.svg"
    plot_bytes(path, [], [1_000_000 + rank for rank in range(512)], title="llama")
    texts = texts_of(path)
    assert "after: 512 ranks, 1 MB each" in texts and not any(text.startswith("before") for text in texts)


def test_one_element_that_differs_is_ringed(tmp_path: Path) -> None:
    counts = [[0] * 64 for _ in range(64)]
    plot_differences(tmp_path / "none.svg", "w", counts, sizes=(4096, 4096), cell_sizes=(64, 64), dims=(0, 1))
    counts[40][13] = 1
    plot_differences(tmp_path / "one.svg", "w", counts, sizes=(4096, 4096), cell_sizes=(64, 64), dims=(0, 1))
    none, one = (len(re.findall("#d55e00", (tmp_path / name).read_text())) for name in ("none.svg", "one.svg"))
    assert (none, one) == (0, 1)


def test_many_elements_have_a_scale(tmp_path: Path) -> None:
    path = tmp_path / "many.svg"
    plot_differences(
        path,
        "w",
        [[row * col for col in range(64)] for row in range(64)],
        sizes=(4090, 4000),
        cell_sizes=(64, 63),
        dims=(1, 2),
    )
    assert {"1", "10", "100", "1,000", "dim 1", "dim 2"} <= set(texts_of(path))
    assert "#d55e00" not in path.read_text()


# ---- without matplotlib, and other endings ----


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torchtitan_ext.cli.pictures.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(typer.BadParameter, match=re.escape('pip install "torchtitan-ext[plot]"')):
        plotter(Path("bytes.svg"))


@pytest.mark.parametrize("name", ["layout", "layout.txt"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"got {name}, expected a name that ends in .svg"):
        plotter(Path(name))


def test_plots_are_found() -> None:
    assert plotter(Path("a.PNG")).plot_bytes is plot_bytes
