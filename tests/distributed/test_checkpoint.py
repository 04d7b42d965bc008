"""`tte.save` and `tte.load` around DCP: whose error is whose."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte


class Picky:
    """Refuses on rank 1 what it is given, as `nn.Module.load_state_dict` does: with a RuntimeError."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.rank == 1:
            raise RuntimeError("Error(s) in loading state_dict for Picky")


def load_picky(rank: int, world_size: int, path: Path) -> str:
    tte.save({"picky": Picky(rank)}, path)
    try:
        tte.load({"picky": Picky(rank)}, path)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_an_error_of_an_object_is_no_lost_rank(run_world, tmp_path: Path) -> None:
    answers = run_world(2, load_picky, tmp_path)
    assert answers == ["fine", "RuntimeError: Error(s) in loading state_dict for Picky"]


@pytest.mark.parametrize("call", [tte.save, tte.load, tte.async_save])
def test_a_place_is_needed(call: Any) -> None:
    with pytest.raises(ValueError, match=f"{call.__name__.removeprefix('async_')}: got neither a path nor storage"):
        call({"step": 1})
