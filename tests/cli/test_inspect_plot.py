"""``torchtitan-ext inspect PATH KEY --plot FILE``: who holds what of a tensor."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, make
from matplotlib.image import imread
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import torchtitan_ext as tte
from torchtitan_ext.cli.output import FINE, WRONG_USAGE
from torchtitan_ext.cli.picture import plot_holders
from torchtitan_ext.layout.layout import Box


def save_on_four(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tte.save({"w": distribute_tensor(torch.ones(6, 8), mesh, [Shard(0), Shard(1)])}, path)


def texts_of(path: Path) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.S)]


def sharded_2d(num_dp: int, num_tp: int, rows: int, cols: int) -> list[tuple[str, Box]]:
    """Rows cut along dp, columns along tp, evenly; ranks count tp first."""
    height, width = rows // num_dp, cols // num_tp
    return [
        (f"__{dp * num_tp + tp}_0.distcp", ((dp * height, tp * width), (height, width)))
        for dp in range(num_dp)
        for tp in range(num_tp)
    ]


def test_ranks_rows_and_columns(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(4, save_on_four, tmp_path / "step-1")
    picture = tmp_path / "layout.svg"
    shown = call("inspect", tmp_path / "step-1", "w", "--plot", picture)
    assert (shown.code, shown.err) == (FINE, f"torchtitan-ext: wrote {picture}\n")
    texts = texts_of(picture)
    assert {"w, 6 x 8, float32", "saved by 4 ranks (dp 2 x tp 2)", "dim 0", "dim 1", "rank", "3", "4", "6", "8"} <= set(
        texts
    )
    # Once in its box, and once beside the ramp of colours.
    assert all(texts.count(str(rank)) >= 2 for rank in range(4))


@pytest.mark.parametrize("kind", ["stock", "ours without .metadata", "safetensors directory", "torch"])
def test_every_format_has_a_picture(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path / "c", kind)
    shown = call("inspect", path, "layers.0.wq", "--plot", tmp_path / "w.svg", "--json")
    assert shown.code == FINE and [key["name"] for key in shown.json["keys"]] == ["layers.0.wq"]
    texts = texts_of(tmp_path / "w.svg")
    assert any(text.startswith("layers.0.wq, ") for text in texts) and "0" in texts


def test_a_single_number(tmp_path: Path) -> None:
    shown = call("inspect", make(tmp_path / "c", "ours"), "step", "--plot", tmp_path / "step.svg")
    assert shown.code == FINE and {"step, a single number, int64", "0"} <= set(texts_of(tmp_path / "step.svg"))


@pytest.mark.parametrize("name", ["layers.0.wk", "note", "layers.*"])
def test_what_is_no_tensor_is_refused(name: str, tmp_path: Path) -> None:
    shown = call("inspect", make(tmp_path / "c", "ours"), name, "--plot", tmp_path / "layout.svg")
    assert shown.code == WRONG_USAGE and f"has no tensor {name}" in " ".join(shown.err.split())


def test_a_picture_needs_a_tensor_and_an_ending_and_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "c", "ours")
    shown = call("inspect", path, "--plot", "layout.svg")
    assert shown.code == WRONG_USAGE and "got no name of a tensor" in shown.err
    for name in ("layout", "layout.txt"):
        shown = call("inspect", path, "step", "--plot", name)
        assert shown.code == WRONG_USAGE and f"got {name}, expected a name that ends in .svg" in " ".join(
            shown.err.split()
        )
    monkeypatch.delitem(sys.modules, "torchtitan_ext.cli.picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = call("inspect", path, "step", "--plot", tmp_path / "layout.svg")
    assert shown.code == WRONG_USAGE and "torchtitan-ext[plot]" in shown.err


def test_of_many_ranks_none_is_named_where_there_is_no_room(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    plot_holders(path, "w", (16384, 16384), sharded_2d(64, 8, 16384, 16384))
    assert "511" not in texts_of(path) and "16384" in texts_of(path)


def test_the_two_dims_that_are_cut_most_are_drawn(tmp_path: Path) -> None:
    boxes: list[tuple[str, Box]] = [
        (f"__{row * 3 + place}_0.distcp", ((0, row, col), (5, 1, 2)))
        for row in range(3)
        for place, col in enumerate((0, 2, 4))
    ]
    plot_holders(tmp_path / "w.svg", "w", (10, 3, 6), [*boxes, ("__9_0.distcp", ((5, 0, 0), (5, 3, 6)))])
    texts = texts_of(tmp_path / "w.svg")
    assert {"dim 1", "dim 2", "6"} <= set(texts) and "dim 0" not in texts and "9" not in texts


@pytest.mark.parametrize(
    ("boxes", "named"),
    [
        ([("__0_0.distcp", ((0, 0), (0, 4)))], []),
        ([("__0_0.distcp", ((0, 0), (4, 4))), ("__2_0.distcp", ((0, 0), (4, 4)))], ["0, 2"]),
        ([("b.safetensors", ((0, 0), (2, 4))), ("a.safetensors", ((2, 0), (2, 4)))], ["file"]),
    ],
)
def test_empty_boxes_replicas_and_files_without_ranks(
    boxes: list[tuple[str, Box]], named: list[str], tmp_path: Path
) -> None:
    plot_holders(tmp_path / "layout.svg", "w", (4, 4), boxes)
    assert {"w", *named} <= set(texts_of(tmp_path / "layout.svg"))


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_holders(tmp_path / name, "w", (8, 8), sharded_2d(2, 2, 8, 8))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_page_shows_through(tmp_path: Path) -> None:
    plot_holders(tmp_path / "layout.png", "w", (8, 8), sharded_2d(2, 2, 8, 8))
    pixels = imread(tmp_path / "layout.png")
    assert pixels[0, 0, 3] == 0 and pixels[..., 3].max() == 1
