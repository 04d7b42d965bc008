"""Names of a policy that nothing answers to: refused where they are misspelt, else warned of."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.policy_names import name_problems, unused_names
from torchtitan_ext.elastic import ElasticPolicy
from torchtitan_ext.errors import ReshardError

KEYS = ["model.layers.0.w", "optimizer.state.layers.0.w.exp_avg", "optimizer.param_groups", "dataloader.step"]


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("dataloder", "perhaps 'dataloader' is meant"),
        ("optimiser.state.*", r"perhaps 'optimizer.state.\*' is meant"),
        ("optimizer.state.*.exp_avgs", r"perhaps 'optimizer.state.\*.exp_avg' is meant"),
        ("optimizer.param_groups.*.lr", "optimizer.param_groups is loaded as one value, this name reaches into it"),
        ("optimizer.param_groups.0", "is loaded as one value"),
        ("model.layers.0.w.scale", "model.layers.0.w is loaded as one value"),
        # For another job, perhaps.
        ("ema", None),
        ("model.lora.*", None),
        ("*.bias", None),
    ],
)
def test_what_cannot_be_meant_for_another_job(name: str, detail: str | None) -> None:
    assert unused_names(ElasticPolicy({name: "reset"}), ["model", "optimizer", "dataloader"], KEYS) == [name]
    problems = name_problems([name], KEYS, KEYS)
    assert [problem.fqn for problem in problems] == ([] if detail is None else [name])
    if detail is not None:
        pytest.raises(ReshardError, raise_refused, problems).match(detail)


def raise_refused(problems: Any) -> None:
    raise tte.errors.refusal("load", problems)


def test_names_that_are_there_are_used() -> None:
    policy = ElasticPolicy({"model": "keep", "optimizer.state.*": "reset", "dataloader.step": "omit"})
    assert unused_names(policy, ["model", "optimizer"], KEYS) == []


def load_by(policy: ElasticPolicy, path: Path) -> dict[str, Any]:
    target = {"model": {"w": torch.zeros(3)}, "counters": {"step": 0}}
    tte.load(target, path, policy=policy)
    return target


def test_a_misspelt_name_is_refused_with_the_policy_without_it(tmp_path: Path) -> None:
    tte.save({"model": {"w": torch.ones(3)}, "counters": {"step": 7}}, tmp_path)
    with pytest.raises(ReshardError, match="'countres'|countres: nothing has this name") as refused:
        load_by(ElasticPolicy({"countres": "reset", "model.w": "omit"}), tmp_path)
    assert "Names of the policy that cannot be followed (1)" in str(refused.value)
    assert refused.value.report.remedy == "ElasticPolicy({'model.w': 'omit'})"
    target = load_by(refused.value.report.remedy_policy, tmp_path)
    assert target["counters"]["step"] == 7 and target["model"]["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("strict", ["error", "warn", "ignore"])
def test_a_name_for_another_job_is_warned_of(tmp_path: Path, caplog: Any, strict: Any) -> None:
    tte.save({"model": {"w": torch.ones(3)}, "counters": {"step": 7}}, tmp_path)
    with caplog.at_level(logging.WARNING, "torchtitan_ext"):
        load_by(ElasticPolicy({"ema": "reset"}, strict=strict), tmp_path)
    assert ("the policy names what is not there: ema" in caplog.text) == (strict != "ignore")


@pytest.mark.parametrize("strict", ["warn", "ignore"])
def test_misspelt_names_go_where_nothing_is_strict(tmp_path: Path, strict: Any) -> None:
    tte.save({"model": {"w": torch.ones(3)}, "counters": {"step": 7}}, tmp_path)
    assert load_by(ElasticPolicy({"countres": "reset"}, strict=strict), tmp_path)["counters"]["step"] == 7
