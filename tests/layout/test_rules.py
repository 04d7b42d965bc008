"""Stated sharding orders: which keys a rule is for, and what is no rule."""

import pickle

import pytest

from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, canonical_fqn, unused_problem

QKV = ShardOrder((("tp", 0, 3), ("dp", 0, 1)))


@pytest.mark.parametrize(
    "fqn",
    [
        "wqkv.weight",
        "layers.0.wqkv.weight",
        "model._orig_mod.layers.0._checkpoint_wrapped_module.wqkv.weight",
        "optimizer.state.layers.0.wqkv.weight.exp_avg",
        "state.wqkv.weight.exp_avg_sq",
    ],
)
def test_a_rule_applies_under_prefixes_and_to_optimizer_state(fqn):
    assert LayoutRules({"wqkv.weight": QKV}).find(fqn) == QKV
    assert LayoutRules({"*wqkv.weight": QKV}).find(fqn) == QKV


@pytest.mark.parametrize("fqn", ["wqkv.bias", "xwqkv.weight", "wqkv.weight.extra"])
def test_a_rule_applies_to_nothing_else(fqn):
    assert LayoutRules({"wqkv.weight": QKV}).find(fqn) is None


def test_an_exact_rule_comes_before_a_glob_and_equal_rules_do_not_clash():
    other = ShardOrder(((0, 0, 1),))
    assert LayoutRules({"*.weight": other, "wqkv.weight": QKV}).find("wqkv.weight") == QKV
    assert LayoutRules({"*.weight": QKV, "w*": QKV}).find("wqkv.weight") == QKV
    with pytest.raises(ValueError, match="make one of them narrower"):
        LayoutRules({"*.weight": other, "w*": QKV}).find("wqkv.weight")


def test_rules_take_orders_only():
    with pytest.raises(TypeError, match="got tuple for 'w', expected a ShardOrder"):
        LayoutRules({"w": (0, 0, 1)})


def test_rules_and_orders_survive_pickling():
    assert pickle.loads(pickle.dumps(QKV)) == QKV
    assert pickle.loads(pickle.dumps(LayoutRules({"w": QKV}))).find("w") == QKV


def test_canonical_fqn():
    assert canonical_fqn("_orig_mod.a._checkpoint_wrapped_module.b") == "a.b"
    assert canonical_fqn("module.a") == "module.a"
    assert canonical_fqn("module.a", strip_module=True) == "a"


def test_a_pattern_that_is_for_no_key_comes_with_the_one_that_was_meant():
    rules = LayoutRules({"wqkv.weight": QKV, "wqvk.weight": QKV})
    keys = ["model.layers.0.wqkv.weight", "model.layers.0.wo.weight"]
    assert rules.matches(keys) == {"wqkv.weight": True, "wqvk.weight": False}
    problem = unused_problem("wqvk.weight", keys)
    assert problem.kind == "unused_layout"
    assert "did you mean 'wqkv.weight' (as in model.layers.0.wqkv.weight)?" in problem.detail
