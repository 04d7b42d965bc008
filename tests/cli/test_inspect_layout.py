"""``torchtitan-ext inspect --layout NAME --plot FILE``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, make
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import torchtitan_ext as tte
from torchtitan_ext.cli.output import FINE, WRONG_USAGE


def save_on_four(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tte.save({"w": distribute_tensor(torch.ones(6, 8), mesh, [Shard(0), Shard(1)])}, path)


def test_ranks_rows_and_columns(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(4, save_on_four, tmp_path / "step-1")
    picture = tmp_path / "layout.svg"
    shown = call("inspect", tmp_path / "step-1", "--layout", "w", "--plot", picture)
    assert (shown.code, shown.err) == (FINE, f"torchtitan-ext: wrote {picture}\n")
    assert shown.out.splitlines() == [
        "w, 6 x 8, float32",
        "saved by 4 ranks (dp 2 x tp 2); each cell has the rank that holds it",
        "dim 0 downwards, dim 1 to the right",
        "  0      4      8",
        "0 ┌──────┬──────┐",
        "  │  0   │  1   │",
        "3 ├──────┼──────┤",
        "  │  2   │  3   │",
        "6 └──────┴──────┘",
    ]
    assert "saved by 4 ranks (dp 2 x tp 2)" in picture.read_text()
    plain = call("inspect", tmp_path / "step-1", "--layout", "w", "--json").json
    assert plain["holders"][3] == {"rank": 3, "boxes": [{"offsets": [3, 4], "sizes": [3, 4]}]}
    assert (plain["name"], plain["dtype"], plain["shape"], plain["held_by"]) == ("w", "float32", [6, 8], "rank")


@pytest.mark.parametrize(
    ("kind", "word"),
    [("stock", "rank"), ("ours without .metadata", "rank"), ("safetensors directory", "file"), ("torch", "file")],
)
def test_every_format_has_layouts(kind: str, word: str, tmp_path: Path) -> None:
    path = make(tmp_path / "c", kind)
    shown = call("inspect", path, "--layout", "layers.0.wq")
    assert shown.code == FINE and f"each cell has the {word} that holds it" in shown.out
    assert shown.out.splitlines()[-2].split() == ["│", "0", "│"]


def test_a_single_number(tmp_path: Path) -> None:
    shown = call("inspect", make(tmp_path / "c", "ours"), "--layout", "step")
    assert shown.code == FINE and shown.out.startswith("step, a single number, int64\n")


@pytest.mark.parametrize("name", ["layers.0.wk", "note"])
def test_what_is_no_tensor_is_refused(name: str, tmp_path: Path) -> None:
    shown = call("inspect", make(tmp_path / "c", "ours"), "--layout", name)
    assert shown.code == WRONG_USAGE and f"has no tensor {name}" in " ".join(shown.err.split())


def test_a_picture_needs_a_tensor_and_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "c", "ours")
    shown = call("inspect", path, "--plot", "layout.svg")
    assert shown.code == WRONG_USAGE and "--layout NAME" in shown.err
    for module in [module for module in sys.modules if module.endswith(".plots")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = call("inspect", path, "--layout", "step", "--plot", tmp_path / "layout.svg")
    assert shown.code == WRONG_USAGE and "torchtitan-ext[plot]" in shown.err
