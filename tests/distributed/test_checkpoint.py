"""`tte.save` and `tte.load` around DCP: whose error is whose."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.errors import CheckpointFailedError


class Picky:
    """Refuses on rank 1 what it is given, as `nn.Module.load_state_dict` does: with a RuntimeError."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.rank == 1:
            raise RuntimeError("Error(s) in loading state_dict for Picky")


def load_picky(rank: int, world_size: int, path: Path, policy: ElasticPolicy | None) -> str:
    tte.save({"picky": Picky(rank)}, path)
    with pytest.raises(CheckpointFailedError) as caught:
        tte.load({"picky": Picky(rank)}, path, policy=policy)
    assert caught.value.undefined == ("picky",)
    return str(caught.value)


@pytest.mark.parametrize("policy", [None, ElasticPolicy()], ids=["stock", "policy"])
def test_an_object_that_raises_on_one_rank_is_heard_of_on_all(run_world, tmp_path: Path, policy: Any) -> None:
    first, second = run_world(2, load_picky, tmp_path, policy)
    assert first == second
    assert "rank 1: RuntimeError: Error(s) in loading state_dict for Picky" in first


def test_a_save_says_what_it_wrote(tmp_path: Path) -> None:
    result = tte.save({"w": torch.ones(100), "step": 1}, tmp_path)
    assert result.path == str(tmp_path) and result.save_id
    assert result.num_bytes >= 400
    assert set(result.seconds) == {"prepare", "plan", "write"} and all(s > 0 for s in result.seconds.values())
    assert set(result.metadata.state_dict_metadata) == {"w", "step"}


def save_and_compare(rank: int, world_size: int, path: Path) -> tuple[Any, ...]:
    result = tte.save({"w": torch.ones(10, rank + 1), f"own_{rank}": rank} if rank else {"own_0": 0}, path)
    return result.path, result.save_id, result.num_bytes


def test_all_ranks_are_told_the_same_of_a_save(run_world, tmp_path: Path) -> None:
    first, second = run_world(2, save_and_compare, tmp_path)
    assert first == second


def test_a_planner_keeps_the_report_of_its_load(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(3), "step": 1}, tmp_path)
    planner = tte.LoadPlanner(policy=ElasticPolicy())
    report = tte.load({"w": torch.zeros(3), "step": 0}, tmp_path, planner=planner)
    assert report is not None and planner.report is report


class Unpicklable(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class Stubborn:
    """Raises what cannot be read back from a pickle."""

    def state_dict(self) -> dict[str, Any]:
        raise Unpicklable(reason="no state today")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def save_stubborn(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(CheckpointFailedError) as caught:
        tte.save({"it": Stubborn() if rank else 1}, path)
    return str(caught.value)


def test_errors_that_do_not_pickle_reach_all_ranks_as_text(run_world, tmp_path: Path) -> None:
    first, second = run_world(2, save_stubborn, tmp_path)
    assert first == second and "rank 1: RuntimeError: Unpicklable: no state today" in first
