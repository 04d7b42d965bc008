"""Random nested states in four directions: saved and loaded by the stock planners and by ours.

Where stock gives back what was saved, so do we, and each reads what the other wrote; the exceptions are rows of
``docs/reference/planners.md``. What we give back is never wrong, also where stock is.
"""

import collections
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from random_states import are_equal, blank, holds, is_foreign, is_walked_by_us_only, random_state
from tier import SOAK, num_cases
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan_ext as tte
from torchtitan_ext.storage.inspect.verify import verify

NUM_STATES = 1000 if SOAK > 1 else num_cases(120)


@dataclass(frozen=True)
class Side:
    """Who saves or loads."""

    save_planner: Callable[[], Any]
    load_planner: Callable[[], Any]


STOCK = Side(DefaultSavePlanner, DefaultLoadPlanner)
OURS = Side(tte.SavePlanner, tte.LoadPlanner)
TRUSTING = Side(tte.SavePlanner, lambda: tte.LoadPlanner(weights_only=False))


def save(side: Side, state: dict[str, Any], path: Path) -> BaseException | None:
    try:
        dcp.save(state, checkpoint_id=path, planner=side.save_planner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        return error
    return None


def outcome(side: Side, state: dict[str, Any], path: Path) -> str:
    target = blank(state)
    try:
        dcp.load(target, checkpoint_id=path, planner=side.load_planner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        return f"refused: {error}"
    return "equal" if are_equal(state, target) else "wrong"


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_random_states_in_four_directions(tmp_path: Path) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(NUM_STATES):
        state = random_state(seed)
        by_stock, by_us = tmp_path / "stock", tmp_path / "ours"
        stock_error = save(STOCK, state, by_stock)
        our_error = save(OURS, state, by_us)
        assert our_error is None, (seed, our_error)
        for path in [by_us, *([] if stock_error else [by_stock])]:
            assert not verify(path, is_deep=True).damages, seed
        ours = outcome(TRUSTING, state, by_us)
        assert ours == "equal", (seed, ours)
        by_default = outcome(OURS, state, by_us)
        if holds(state, is_foreign):
            assert "not plain data" in by_default, (seed, by_default)
        else:
            assert by_default == "equal", (seed, by_default)
        if stock_error is None:
            stock = outcome(STOCK, state, by_stock)
            outcomes[stock.split(":")[0]] += 1
            if stock == "equal":
                across = outcome(TRUSTING, state, by_stock)
                back = outcome(STOCK, state, by_us)
                row = holds(state, is_walked_by_us_only)
                outcomes["rows"] += row
                assert across == "equal" or (row and across.startswith("refused")), (seed, across)
                assert back == "equal" or (row and back.startswith("refused")), (seed, back)
        shutil.rmtree(by_stock)
        shutil.rmtree(by_us)
    assert outcomes["equal"] > NUM_STATES // 2, outcomes
