"""The examples for other people's frameworks, run on every rank of a world as ``torchrun`` does."""

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torchtitan_ext as tte

pytestmark = pytest.mark.nightly("clients")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(rank: int, world_size: int, name: str, path: Path) -> str:
    """What it prints."""
    printed = io.StringIO()
    # The rule for what is compiled is the process's, as what is installed.
    stance = torch.compiler.set_stance("default")
    # accelerate says in it what a plugin has chosen, and chooses a number of threads where none is set.
    environment = mock.patch.dict(os.environ, OMP_NUM_THREADS="1")
    try:
        with (
            mock.patch.object(sys, "argv", [name, str(path)]),
            contextlib.redirect_stdout(printed),
            stance,
            environment,
        ):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        tte.integrations.uninstall()
        forget_accelerate()
    return printed.getvalue()


def forget_accelerate() -> None:
    """It keeps in a module what it has found out about a world."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\d+\.\d{4})$", printed, re.M)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "name", "old", "new"),
    [
        ("lightning", "lightning_fabric.py", 6, 2),
        ("torchao", "torchao_float8.py", 4, 3),
        ("accelerate", "accelerate_fsdp2.py", 4, 3),
        ("transformers", "transformers_trainer.py", 4, 3),
        ("peft", "peft_lora.py", 4, 3),
    ],
)
def test_the_example_goes_on_with_other_ranks(
    run_world: Callable[..., Any], tmp_path: Path, library: str, name: str, old: int, new: int
) -> None:
    pytest.importorskip(library)
    first, second = (losses(run_world(n, run_example, name, tmp_path / "run")[0]) for n in (old, new))
    assert list(first) == [1, 2, 3] and list(second) == [4, 5, 6]
    same_ranks = [losses(run_world(new, run_example, name, tmp_path / "same")[0]) for _ in range(2)]
    assert first == pytest.approx(same_ranks[0], abs=2e-4)  # of the last digit that is printed
    assert second == pytest.approx(same_ranks[1], abs=2e-4)
