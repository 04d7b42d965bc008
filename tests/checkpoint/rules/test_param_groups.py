"""Options of parameter groups follow their parameters, and what cannot follow is said."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import SGD, AdamW

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.param_groups import find_moved
from torchtitan_ext.elastic import ElasticPolicy, GroupNote, find_option_gaps, merge_param_groups


def group(params: list[Any], **options: Any) -> dict[str, Any]:
    return {"params": params, **options}


def texts(notes: list[GroupNote]) -> list[str]:
    return [str(note) for note in notes]


def test_equal_groups_take_the_saved_options() -> None:
    saved = [group([0, 1], lr=0.1, betas=[0.9, 0.95]), group([2], lr=0.2, betas=[0.8, 0.9])]
    current = [group([0, 1], lr=1.0, betas=(0.0, 0.0)), group([2], lr=2.0, betas=(0.0, 0.0))]
    before = copy.deepcopy((saved, current))
    merged, notes = merge_param_groups(saved, current)
    assert merged == [group([0, 1], lr=0.1, betas=(0.9, 0.95)), group([2], lr=0.2, betas=(0.8, 0.9))]
    assert notes == []
    assert (saved, current) == before


def test_options_that_a_newer_torch_added_are_filled_and_gone_ones_dropped() -> None:
    saved = [group(["w"], lr=0.1, old_option=3)]
    merged, notes = merge_param_groups(saved, [group(["w"], lr=1.0, decoupled_weight_decay=True)])
    assert merged == [group(["w"], lr=0.1, decoupled_weight_decay=True)]
    assert texts(notes) == [
        "filled: group 0 keeps decoupled_weight_decay=True, which the checkpoint lacks",
        "dropped: group 0 has no option old_option any more (saved 3)",
    ]


def test_what_schedulers_keep_in_groups_comes_along() -> None:
    merged, notes = merge_param_groups([group(["w"], lr=0.1, initial_lr=0.5)], [group(["w"], lr=1.0)])
    assert merged == [group(["w"], lr=0.1, initial_lr=0.5)]
    assert notes == []


def test_new_and_removed_groups() -> None:
    saved = [group(["a", "b"], lr=0.1), group(["c"], lr=0.2)]
    merged, notes = merge_param_groups(saved, [group(["x"], lr=3.0), group(["b", "a"], lr=1.0)])
    assert merged == [group(["x"], lr=3.0), group(["b", "a"], lr=0.1)]
    assert texts(notes) == [
        "new: group 0 (x) keeps this run's options",
        "removed: saved group 1 (c) has no parameter here",
    ]


def test_frozen_and_unfrozen_parameters() -> None:
    saved = [group(["a", "b", "c", "d", "e"], lr=0.1)]
    merged, notes = merge_param_groups(saved, [group(["a", "x"], lr=1.0)])
    assert merged == [group(["a", "x"], lr=0.1)]
    assert texts(notes) == [
        "unfrozen: group 0 has x, which the checkpoint does not",
        "frozen: saved group 0 has b, c, d and 1 more, not optimized here",
    ]


def test_a_split_group_takes_its_options_twice() -> None:
    merged, notes = merge_param_groups(
        [group(["a", "b"], lr=0.1)], [group(["a"], lr=1.0), group(["b"], lr=2.0, fused=True)]
    )
    assert merged == [group(["a"], lr=0.1), group(["b"], lr=0.1, fused=True)]
    assert texts(notes) == ["filled: group 1 keeps fused=True, which the checkpoint lacks"]


def test_joined_groups_must_agree() -> None:
    saved = [group(["a"], lr=0.1, eps=1e-8), group(["b"], lr=0.2, eps=1e-8)]
    merged, notes = merge_param_groups(saved, [group(["a", "b"], lr=1.0, eps=0.0)])
    assert merged == [group(["a", "b"], lr=1.0, eps=0.0)]
    assert texts(notes) == [
        "problem: group 0 joins parameters of saved groups 0, 1, whose options differ: lr is 0.1 in group 0, 0.2 in "
        "group 1; keep them in groups of their own, or make the values equal before the save"
    ]
    saved[1]["lr"] = 0.1
    assert merge_param_groups(saved, [group(["a", "b"], lr=1.0, eps=0.0)]) == (
        [group(["a", "b"], lr=0.1, eps=1e-8)],
        [],
    )


def test_a_difference_in_an_option_that_is_gone_does_not_matter() -> None:
    saved = [group(["a"], lr=0.1, gone=1), group(["b"], lr=0.1, gone=2)]
    merged, notes = merge_param_groups(saved, [group(["a", "b"], lr=1.0)])
    assert merged == [group(["a", "b"], lr=0.1)]
    assert [note.kind for note in notes] == ["dropped"]


def test_positions_do_not_say_which_parameter_was_frozen() -> None:
    merged, notes = merge_param_groups([group([0, 1, 2], lr=0.1)], [group([0, 1], lr=1.0)])
    assert merged == [group([0, 1], lr=1.0)]
    assert texts(notes) == [
        "problem: the checkpoint has 3 parameter(s) by position and no names, this optimizer has 2: which is which "
        "cannot be told; save it again by the job that has these, and load it, with an optimizer built from "
        "named_parameters(), or by get_optimizer_state_dict"
    ]


def test_names_beside_ids_do_say_it() -> None:
    saved = [group([0, 1, 2], param_names=["a", "b", "c"], lr=0.1)]
    merged, notes = merge_param_groups(saved, [group([0, 1], param_names=["a", "c"], lr=1.0)])
    assert merged == [group([0, 1], param_names=["a", "c"], lr=0.1)]
    assert texts(notes) == ["frozen: saved group 0 has b, not optimized here"]


def test_ids_may_move_between_groups() -> None:
    merged, notes = merge_param_groups([group([0, 1, 2], lr=0.1)], [group([0], lr=1.0), group([1, 2], lr=2.0)])
    assert [member["lr"] for member in merged] == [0.1, 0.1]
    assert notes == []


def test_groups_of_a_real_optimizer_load_back() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    trained = AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=0.1)
    saved = trained.state_dict()["param_groups"]
    del saved[0]["decoupled_weight_decay"]
    model[0].bias.requires_grad_(True)
    current = AdamW(model.named_parameters(), lr=0.5)
    merged, notes = merge_param_groups(saved, current.state_dict()["param_groups"])
    assert [note.kind for note in notes] == ["unfrozen", "filled"]
    current.load_state_dict({"state": {}, "param_groups": merged})
    assert current.param_groups[0]["lr"] == 0.1
    assert current.param_groups[0]["decoupled_weight_decay"] is True


def test_options_that_this_run_keeps() -> None:
    saved = [group(["a"], lr=0.1, eps=1e-8, initial_lr=0.5), group(["b"], lr=0.2, eps=1e-8)]
    current = [group(["a", "b"], lr=1.0, eps=0.0)]
    merged, notes = merge_param_groups(saved, current, keeps=lambda index, option: option in ("lr", "initial_lr"))
    assert merged == [group(["a", "b"], lr=1.0, eps=1e-8)]
    assert texts(notes) == ["kept: group 0 keeps this run's lr=1.0"]


def two_rates(lr: float) -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    return AdamW([{"params": [first], "lr": lr}, {"params": [second], "lr": 2 * lr, "weight_decay": lr}], lr=lr)


@pytest.mark.parametrize(
    ("actions", "rates", "decay"),
    [
        ({}, [0.1, 0.2], 0.1),
        ({"optimizer.param_groups.*.lr": "omit"}, [0.5, 1.0], 0.1),
        ({"optimizer.param_groups.1.lr": "reset"}, [0.1, 1.0], 0.1),
        ({"optimizer.param_groups.1.*": "omit"}, [0.1, 1.0], 0.5),
        ({"optimizer.param_groups.*": "omit"}, [0.5, 1.0], 0.5),
        ({"optimizer.param_groups.*": "omit", "optimizer.param_groups.0.lr": "error"}, [0.5, 1.0], 0.5),
        ({"*.lr": "omit"}, [0.5, 1.0], 0.1),
        ({"optimizer": "keep", "optimizer.param_groups.*.lr": "omit"}, [0.5, 1.0], 0.1),
    ],
)
def test_a_policy_chooses_single_options(tmp_path: Path, actions: Any, rates: list[float], decay: float) -> None:
    tte.save({"optimizer": two_rates(0.1)}, tmp_path)
    optimizer = two_rates(0.5)
    report = tte.load({"optimizer": optimizer}, tmp_path, policy=ElasticPolicy(actions))
    assert [member["lr"] for member in optimizer.param_groups] == rates
    assert optimizer.param_groups[1]["weight_decay"] == decay
    assert report is not None and report.unused == () and "dropped" not in str(report)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (ElasticPolicy({"optimizer.param_groups.*.lrr": "omit"}), "reaches into it"),
        (ElasticPolicy({"optimizer.param_groups.w.lr": "omit"}), "reaches into it"),
        (
            ElasticPolicy({"optimizer.param_groups.*.lr": "error"}),
            "the action of optimizer.param_groups.0.lr is 'error'",
        ),
    ],
)
def test_options_that_a_policy_cannot_choose_are_refused(tmp_path: Path, policy: Any, reason: str) -> None:
    state = two_rates(0.1).state_dict()
    # By stock, which does not say how many ranks saved.
    torch.distributed.checkpoint.save({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(tte.errors.ReshardError, match=reason):
        tte.load({"optimizer": two_rates(0.5)}, tmp_path, policy=policy)


NAMES = [f"layer.{index}" for index in range(6)]


@st.composite
def partitions(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Groups over some of the names, each with its own learning rate or all with one."""
    places = draw(st.lists(st.integers(-1, 2), min_size=len(NAMES), max_size=len(NAMES)))
    rates = draw(st.lists(st.sampled_from([0.1, 0.2]), min_size=3, max_size=3))
    groups = [
        group([name for name, place in zip(NAMES, places, strict=True) if place == number], lr=rate)
        for number, rate in enumerate(rates)
    ]
    return [member for member in groups if member["params"]]


@given(saved=partitions(), current=partitions())
def test_every_parameter_keeps_its_learning_rate_or_is_in_a_note(saved: Any, current: Any) -> None:
    current = [{**member, "lr": 9.0} for member in current]
    merged, notes = merge_param_groups(saved, current)
    rate_of = {name: member["lr"] for member in saved for name in member["params"]}
    said = " ".join(texts(notes))
    assert [member["params"] for member in merged] == [member["params"] for member in current]
    for index, member in enumerate(merged):
        known = {rate_of[name] for name in member["params"] if name in rate_of}
        if len(known) == 1:
            assert member["lr"] in known
        elif known:
            assert f"problem: group {index} joins" in said
        else:
            assert f"new: group {index} " in said
            assert member["lr"] == 9.0
    held = {name for member in current for name in member["params"]}
    lost = {note.kind for note in notes} & {"removed", "frozen"}
    assert bool(lost) == bool(set(rate_of) - held)


# The flat form.


def test_gaps_of_the_flat_form() -> None:
    saved = [
        "model.w",
        "optimizer.param_groups.a.weight.lr",
        "optimizer.param_groups.a.weight.gone",
        "optimizer.param_groups.b.weight.lr",
        "optimizer.state.a.weight.exp_avg",
        "optimizer.state.b.weight.exp_avg",
    ]
    wanted = [
        "model.new",
        *(f"optimizer.param_groups.{fqn}.{option}" for fqn in ("a.weight", "c") for option in ("lr", "fused")),
        *(f"optimizer.state.{fqn}.{name}" for fqn in ("a.weight", "c") for name in ("exp_avg", "shampoo.left")),
    ]
    gaps = find_option_gaps(saved, wanted)
    assert gaps.fillable == ("optimizer.param_groups.a.weight.fused",)
    assert gaps.missing == {
        "c": (
            "optimizer.param_groups.c.fused",
            "optimizer.param_groups.c.lr",
            "optimizer.state.c.exp_avg",
            "optimizer.state.c.shampoo.left",
        )
    }
    assert gaps.incomplete == ("optimizer.state.a.weight.shampoo.left",)
    assert gaps.dropped == ("optimizer.param_groups.a.weight.gone",)


def test_an_option_that_only_this_parameter_lacks_is_not_filled() -> None:
    gaps = find_option_gaps(
        ["param_groups.a.lr", "param_groups.b.lr", "param_groups.b.eps"], ["param_groups.a.lr", "param_groups.a.eps"]
    )
    assert (gaps.fillable, gaps.incomplete, gaps.dropped) == ((), ("param_groups.a.eps",), ())


def test_each_optimizer_has_options_of_its_own() -> None:
    gaps = find_option_gaps(["muon.param_groups.a.lr", "adam.param_groups.b.eps"], ["muon.param_groups.a.eps"])
    assert gaps.fillable == ("muon.param_groups.a.eps",)


@pytest.mark.parametrize(("old", "new"), [(SGD, AdamW), (AdamW, SGD), (AdamW, AdamW)])
def test_gaps_of_torchs_own_flat_form(old: type, new: type) -> None:
    def flat(kind: type, frozen: str) -> set[str]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != frozen)
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return set(get_optimizer_state_dict(model, optimizer, options=options))

    saved, wanted = flat(old, "0.bias"), flat(new, "1.bias")
    gaps = find_option_gaps(saved, wanted)
    lacking = {*gaps.fillable, *gaps.incomplete, *(key for keys in gaps.missing.values() for key in keys)}
    assert lacking == wanted - saved
    assert set(gaps.missing) == {"0.bias"}
    if old is new:
        assert (gaps.fillable, gaps.incomplete) == ((), ())
    else:
        assert gaps.fillable and gaps.dropped


def test_named_parameters_at_other_positions() -> None:
    saved = [{"params": [0, 1, 2], "param_names": ["a", "b", "c"], "lr": 0.1}]
    assert find_moved(saved, [{"params": [0, 1], "param_names": ["a", "c"], "lr": 0.1}]) == ["c"]
    assert find_moved(saved, [{"params": [0, 1, 2, 3], "param_names": ["a", "b", "c", "d"], "lr": 0.1}]) == []
    assert find_moved(saved, [{"params": ["a", "c"], "lr": 0.1}]) == []


def test_state_by_position_is_not_given_to_others(tmp_path: Path) -> None:
    def make(order: str) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([(name, nn.Parameter(torch.zeros(2))) for name in order])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)
        optimizer.step()
        return optimizer

    tte.save({"optimizer": make("ab")}, tmp_path, no_dist=True)
    with pytest.raises(tte.errors.StateRefusedError, match="its state is saved by position, and b, a have another one"):
        tte.load({"optimizer": make("ba")}, tmp_path, policy=ElasticPolicy(), no_dist=True)
    tte.load({"optimizer": make("ab")}, tmp_path, policy=ElasticPolicy(), no_dist=True)
