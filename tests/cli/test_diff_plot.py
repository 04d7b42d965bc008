"""``torchtitan-ext diff --plot FILE``."""

from pathlib import Path
from typing import Any

import torch
from calls import call, make

from torchtitan_ext.cli.output import DIFFERS, FINE, WRONG_USAGE

STATE: dict[str, Any] = {"v": torch.zeros(3), "w": torch.zeros(500, 300), "x": torch.zeros(2, 2), "note": "one"}


def test_the_first_tensor_that_differs_is_drawn(tmp_path: Path) -> None:
    changed = {**STATE, "w": STATE["w"].clone(), "x": torch.ones(2, 2), "note": "two"}
    changed["w"][100, 200] = 1
    a, b = make(tmp_path / "a", "ours", STATE), make(tmp_path / "b.pt", "torch", changed)
    picture = tmp_path / "w.svg"
    assert call("diff", a, b, "--plot", picture).code == DIFFERS
    text = picture.read_text()
    assert "w, 500 x 300" in text
    assert "1 of 150,000 elements differ, first [100, 200]; tensors that differ: 2" in text
    assert call("diff", a, b, "--only", "x", "--plot", picture).code == DIFFERS
    assert "x, 2 x 2" in picture.read_text()


def test_without_a_difference_there_is_nothing_to_draw(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", "ours", STATE), make(tmp_path / "b", "stock", STATE)
    shown = call("diff", a, b, "--plot", tmp_path / "none.svg")
    assert shown.code == FINE and "nothing is drawn" in shown.err
    assert not (tmp_path / "none.svg").exists()


def test_other_endings_are_refused_before_the_work(tmp_path: Path) -> None:
    shown = call("diff", tmp_path / "a", tmp_path / "b", "--plot", "w.txt")
    assert shown.code == WRONG_USAGE and "w.txt" in shown.err
