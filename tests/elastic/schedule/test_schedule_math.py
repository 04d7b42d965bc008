"""Schedules away from their optimizer: copied, restored, cut by group and played."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lrs
from test_lr_scheduler import ALL, CLOSED_FORM, build_optimizer, options_of, step_all

from torchtitan_ext.elastic.schedule import schedule_math
from torchtitan_ext.errors import CannotReshardError


@pytest.mark.parametrize("name", ALL)
def test_a_copy_stands_alone(name: str) -> None:
    optimizer = build_optimizer()
    scheduler = ALL[name](optimizer)
    step_all(scheduler, optimizer, 3)
    before, state = options_of(optimizer), repr(scheduler.state_dict())
    clone = schedule_math.copied(scheduler)
    assert repr(clone.state_dict()) == state
    for _ in range(4):
        clone.step(1.0) if name == "ReduceLROnPlateau" else clone.step()
    assert (options_of(optimizer), repr(scheduler.state_dict())) == (before, state)


@pytest.mark.parametrize("name", ALL)
def test_what_is_described_is_restored(name: str) -> None:
    optimizer, other = build_optimizer(), build_optimizer()
    scheduler, fresh = ALL[name](optimizer), ALL[name](other)
    step_all(scheduler, optimizer, 5)
    described = schedule_math.described(scheduler)
    assert described["type"] == type(scheduler).__name__
    assert schedule_math.fits(described["state"], fresh.state_dict())
    schedule_math.restore(fresh, described["state"], described["groups"])
    assert step_all(fresh, other, 5, start=5) == step_all(scheduler, optimizer, 5, start=5)


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_a_schedule_is_played_to_where_a_run_would_be(name: str) -> None:
    optimizer = build_optimizer()
    scheduler = ALL[name](optimizer)
    played = schedule_math.copied(scheduler)
    schedule_math.move_to(played, 6, remedy="")
    step_all(scheduler, optimizer, 6)
    rates = [group["lr"] for group in played.optimizer.param_groups]
    assert rates == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12)
    assert schedule_math.step_of(played.state_dict()) == 6


def test_values_of_groups_are_selected_in_every_member() -> None:
    state = {"base_lrs": [1, 2], "gamma": 0.5, "min_lrs": 3, "_schedulers": [{"_last_lr": [4, 5]}]}
    selected = schedule_math.select_groups(state, [1, 0, 1])
    assert selected == {"base_lrs": [2, 1, 2], "gamma": 0.5, "min_lrs": 3, "_schedulers": [{"_last_lr": [5, 4, 5]}]}
    assert state["base_lrs"] == [1, 2]


@pytest.mark.parametrize(
    ("state", "step"),
    [({"last_epoch": 3}, 3), ({"_schedulers": [{"last_epoch": 4}]}, 4), ({"_schedulers": []}, None), ({}, None)],
)
def test_the_step_of_a_state(state: dict[str, Any], step: int | None) -> None:
    assert schedule_math.step_of(state) == step


def test_states_that_flat_keys_took_apart_come_back() -> None:
    flat = {"base_lrs": {"0": 0.1, "1": 0.2}, "milestones": {"30": 1}, "_schedulers": [{"_last_lr": {"0": 1.0}}]}
    restored = schedule_math.normalized(flat)
    assert restored["base_lrs"] == [0.1, 0.2] and restored["milestones"] == Counter({30: 1})
    assert restored["_schedulers"] == [{"_last_lr": [1.0]}]


def test_plain_values_hold_no_tensor_and_share_nothing() -> None:
    value = {"lr": torch.tensor(0.5), "betas": (torch.tensor(1.0), 2), "list": [1]}
    made = schedule_math.plain(value)
    assert made == {"lr": 0.5, "betas": (1.0, 2), "list": [1]} and made["list"] is not value["list"]


def test_a_learning_rate_that_is_a_tensor_stays_it() -> None:
    rate = torch.tensor(0.1)
    group: dict[str, Any] = {"lr": rate}
    schedule_math.set_option(group, "lr", 0.5)
    schedule_math.set_option(group, "momentum", 0.9)
    assert group["lr"] is rate and rate.item() == 0.5 and group["momentum"] == 0.9


def test_schedules_of_unknown_memory_are_refused() -> None:
    plateau = schedule_math.copied(lrs.ReduceLROnPlateau(build_optimizer()))
    with pytest.raises(CannotReshardError, match="follows the metrics it was given"):
        schedule_math.move_to(plateau, 3, remedy="load another state")
