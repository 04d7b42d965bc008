"""Policies and sources: what they choose, and what they refuse to be made of."""

import re
from typing import Any

import pytest

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.policy import check_rules
from torchtitan_ext.elastic import ElasticPolicy, Source


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ElasticPolicy("reshard"), "ElasticPolicy: got actions='reshard', expected a mapping"),
        (lambda: ElasticPolicy([("rng", "reset")]), "got actions=a list, expected a mapping"),
        (lambda: ElasticPolicy({3: "reset"}), "got name=3, expected the text of a component or of a glob"),
        (lambda: Source(3), "Source: got path=3, expected a directory"),
        (lambda: Source("A", include="model"), "got include='model', expected a list of globs"),
        (lambda: Source("A", exclude=[3]), "got exclude=a list, expected a list of globs"),
        (lambda: Source("A", rename="model"), "got rename='model', expected a mapping such as"),
        (lambda: Source("A", rename={"model.*": 3}), "got rename=a dict, expected a mapping such as"),
        (lambda: Source("A", storage_reader=Source), "got storage_reader=the class Source, expected a DCP storage"),
        (lambda: tte.load({}, "A", policy="reshard"), "load: got policy='reshard', expected an ElasticPolicy"),
        (lambda: tte.load({}, "A", policy=ElasticPolicy), "got policy=the class ElasticPolicy, expected an Elastic"),
        (lambda: tte.load({}, ["A"]), "got path=a list, expected a directory"),
        (lambda: tte.LoadPlanner(policy={"rng": "reset"}), "LoadPlanner: got policy=a dict, expected an ElasticPolicy"),
        (lambda: tte.LoadPlanner(source="A"), "LoadPlanner: got source='A', expected a Source"),
    ],
)
def test_arguments_of_another_type(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_right_rules_pass() -> None:
    check_rules("load", None)
    check_rules("load", ElasticPolicy())


def test_a_glob_wins_over_a_component_and_an_earlier_glob_over_a_later_one() -> None:
    policy = ElasticPolicy({"model": "keep", "model.head.*": "omit", "model.*.bias": "reset"}, default="error")
    actions = [policy.key_action(key, "model") for key in ("model.head.bias", "model.body.bias", "model.body.weight")]
    assert actions == ["omit", "reset", "keep"]
    assert policy.component_action("model") == "keep"
    assert policy.component_action("optimizer") == "error"


def test_an_object_is_chosen_as_a_whole_by_a_glob_of_all_its_keys() -> None:
    policy = ElasticPolicy({"data*": "reset", "rng.rank_0": "omit"})
    assert policy.object_action("dataloader") == "reset"
    assert policy.object_action("rng") == "reshard"


@pytest.mark.parametrize(
    "policy",
    [ElasticPolicy(), ElasticPolicy({"rng": "reset"}, strict="warn"), ElasticPolicy(default="keep")],
    ids=repr,
)
def test_a_policy_is_shown_as_the_call_that_makes_it(policy: ElasticPolicy) -> None:
    again = eval(repr(policy))
    assert (again.actions, again.default, again.strict) == (policy.actions, policy.default, policy.strict)


def test_a_source_selects_components_globs_and_what_is_below_them() -> None:
    source = Source("A", include=["model", "*.step"], exclude=["model.*lora*"])
    keys = ["model", "model.w", "model.lora_a", "modeling", "trainer.step", "trainer.epoch"]
    assert [key for key in keys if source.selects(key)] == ["model", "model.w", "trainer.step"]


def test_names_go_there_and_back() -> None:
    source = Source("A", rename={"model.layers.*.w*": "module.*.weight*", "optimizer.*": "optim.*"})
    for own, saved in [("model.layers.3.w1", "module.3.weight1"), ("optimizer.a.b", "optim.a.b"), ("step", "step")]:
        assert source.saved_name(own) == saved
        assert source.own_name(saved) == own
    assert source.saved_prefix("optimizer") == "optim"


def test_the_message_of_a_rename_names_both_sides() -> None:
    with pytest.raises(ValueError, match=re.escape("rename of 'a.*' to 'b': both need the same number of '*'")):
        Source("A", rename={"a.*": "b"})
