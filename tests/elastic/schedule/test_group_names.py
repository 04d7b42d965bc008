"""Learning rates follow the parameters of their group, whatever the order of the groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lrs
from test_lr_scheduler import ALL, SCHEDULERS, WORLD, step_all
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Optimizer

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticLRScheduler, ElasticPolicy
from torchtitan_ext.elastic.schedule.group_names import (
    group_names,
    names_entry,
    saved_places,
    sources_of,
)

RATES = {"a": 0.1, "b": 0.05, "c": 0.02}


def optimizer_of(*groups: str, rates: dict[str, float] = RATES) -> Optimizer:
    """Groups of named parameters, a text each, at the rate of their first one."""
    return SGD(
        [
            {"params": [(name, nn.Parameter(torch.ones(2))) for name in names], "lr": rates[names[0]]}
            for names in groups
        ],
        momentum=0.9,
    )


def elastic(optimizer: Optimizer, name: str = "StepLR", **options: Any) -> ElasticLRScheduler:
    return ElasticLRScheduler(ALL[name](optimizer), global_batch_size=64, **options)


def lr_of(optimizer: Optimizer) -> dict[str, Any]:
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("name", ALL)
def test_groups_in_another_order_go_on_bitwise(name: str) -> None:
    optimizer = optimizer_of("a", "b")
    scheduler = elastic(optimizer, name)
    step_all(scheduler, optimizer, 7)
    # Other rates, so that nothing is right by itself.
    swapped = optimizer_of("b", "a", rates={"a": 3.0, "b": 7.0})
    resumed = elastic(swapped, name)
    resharded = resumed.reshard(scheduler.state_dict(), WORLD, WORLD)
    assert "took the step alone" not in resharded.note
    resumed.load_state_dict(resharded.state)
    assert lr_of(swapped) == lr_of(optimizer)
    swapped_back = [options[::-1] for options in step_all(resumed, swapped, 9, start=7)]
    assert swapped_back == step_all(scheduler, optimizer, 9, start=7)


def test_a_group_that_was_cut_keeps_its_rate_in_both_parts() -> None:
    optimizer = optimizer_of("ac", "b")
    scheduler = elastic(optimizer)
    step_all(scheduler, optimizer, 13)
    cut = optimizer_of("c", "b", "a")
    elastic(cut).load_state_dict(scheduler.state_dict())
    assert lr_of(cut) == lr_of(optimizer)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (("ab", "c"), "group 0 joins parameters of saved groups 0, 1, which differ"),
        (("a", "b", "c", "x"), "group 3 has no parameter of the saved groups"),
    ],
)
def test_groups_that_cannot_be_matched_take_the_step(groups: tuple[str, ...], reason: str) -> None:
    optimizer = optimizer_of("a", "b", "c")
    scheduler = elastic(optimizer)
    step_all(scheduler, optimizer, 13)
    other = optimizer_of(*groups, rates={**RATES, "x": 1.0})
    resumed = elastic(other)
    resharded = resumed.reshard(scheduler.state_dict(), WORLD, WORLD)
    assert resharded.note == f"step 13 kept; scheduler 0 took the step alone: {reason}"
    resumed.load_state_dict(resharded.state)
    assert resumed.last_epoch == 13


def test_joined_groups_that_are_equal_are_one() -> None:
    optimizer = optimizer_of("a", "b", rates={"a": 0.1, "b": 0.1})
    scheduler = elastic(optimizer)
    step_all(scheduler, optimizer, 13)
    joined = optimizer_of("ba", rates={"b": 3.0})
    elastic(joined).load_state_dict(scheduler.state_dict())
    assert lr_of(joined) == lr_of(optimizer)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def unnamed(order: str, rates: dict[str, float] = RATES) -> tuple[Layers, Optimizer]:
    model = Layers()
    return model, SGD([{"params": [getattr(model, name)], "lr": rates[name]} for name in order], momentum=0.9)


def test_a_model_names_the_parameters_and_a_checkpoint_carries_both(tmp_path: Path) -> None:
    model, optimizer = unnamed("ab")
    scheduler = elastic(optimizer, model=model)
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    step_all(scheduler, optimizer, 13)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "lr_scheduler": scheduler}
    tte.save(state, tmp_path, no_dist=True)

    model, swapped = unnamed("ba", {"a": 3.0, "b": 7.0})
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    swapped.step()
    resumed = elastic(swapped, model=[nn.Sequential(model)[0]])
    state = {"optimizer": get_optimizer_state_dict(model, swapped), "lr_scheduler": resumed}
    tte.load(state, tmp_path, policy=ElasticPolicy(), no_dist=True)
    set_optimizer_state_dict(model, swapped, state["optimizer"])
    assert [group["lr"] for group in swapped.param_groups] == [0.025, 0.05]
    assert resumed.get_last_lr() == [0.025, 0.05]
    assert [group["initial_lr"] for group in swapped.param_groups] == [0.05, 0.1]


def test_without_names_groups_are_matched_by_position() -> None:
    _, optimizer = unnamed("ab")
    assert group_names(optimizer, {}) is None
    scheduler = elastic(optimizer)
    assert set(scheduler.state_dict()) == {"step", "global_batch_size", "schedulers"}
    _, other = unnamed("ba")
    elastic(other).load_state_dict(scheduler.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.05]


def test_one_group_needs_no_names() -> None:
    assert names_entry([[["a", "b"]], None]) == {}
    assert list(elastic(optimizer_of("ab")).state_dict()) == ["step", "global_batch_size", "schedulers"]


def test_pipeline_stages_save_beside_each_other() -> None:
    stages = [names_entry([[["a"], ["b"]]]), names_entry([[["c"], ["d"]]])]
    merged = {**stages[0], **stages[1]}
    assert len(merged) == 2
    places = saved_places({"step": 3, **merged}, 0)
    assert places == {"a": {0}, "b": {1}, "c": {0}, "d": {1}}
    assert sources_of(places, [["b", "d"], ["c"], ["a", "d"], ["x"]]) == [[1], [0], [0, 1], []]
    assert saved_places(merged, 1) == {}


def test_wrappers_do_not_rename() -> None:
    model = Layers()
    wrapped = nn.ModuleDict({"_orig_mod": model})
    optimizer = SGD(model.parameters(), lr=0.1)
    known = {id(parameter): name for name, parameter in wrapped.named_parameters()}
    assert group_names(optimizer, known) == [["a", "b"]]


def test_a_model_is_a_module_or_a_list() -> None:
    with pytest.raises(TypeError, match="ElasticLRScheduler: got model=the class Layers, expected a module or a list"):
        elastic(optimizer_of("a"), model=Layers)


def test_schedulers_are_instances() -> None:
    for schedulers in (lrs.StepLR, [lrs.StepLR]):
        with pytest.raises(TypeError, match="got schedulers=the class StepLR, expected an LR scheduler or a list"):
            ElasticLRScheduler(schedulers, global_batch_size=1)
    with pytest.raises(TypeError, match="got global_batch_size='64', expected a whole number"):
        ElasticLRScheduler(SCHEDULERS["StepLR"](optimizer_of("a")), global_batch_size="64")
