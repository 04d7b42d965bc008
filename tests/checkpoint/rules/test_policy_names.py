"""Names of a policy that nothing answers to: refused where they are misspelt, else warned of."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.missing_keys import name_problems, unused_names
from torchtitan_ext.elastic import ElasticPolicy, Source
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


def test_a_misspelt_name_is_refused(tmp_path: Path) -> None:
    tte.save({"model": {"w": torch.ones(3)}, "counters": {"step": 7}}, tmp_path)
    with pytest.raises(ReshardError, match="'countres'|countres: nothing has this name") as refused:
        load_by(ElasticPolicy({"countres": "reset", "model.w": "omit"}), tmp_path)
    assert "Names of the policy that cannot be followed (1)" in str(refused.value)
    target = load_by(ElasticPolicy({"model.w": "omit"}), tmp_path)
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


NESTED = {"model": {"w": torch.ones(3)}, "counters": {"step": 7}}
FLAT = {"layers.0.w": torch.ones(3), "norm": torch.ones(2), "optimizer": {"step": torch.tensor(7.0)}}


def zeros_like(value: Any) -> Any:
    return {key: zeros_like(member) for key, member in value.items()} if isinstance(value, dict) else value * 0


@pytest.mark.parametrize("takes_policy", [True, False])
@pytest.mark.parametrize(
    ("saved", "filters", "text"),
    [
        (NESTED, {"include": ["modle"]}, "modle: matches no key; perhaps 'model' is meant; there are model, counters"),
        (NESTED, {"exclude": ["contuers.*"]}, "contuers.*: matches no key; perhaps 'counters.*' is meant"),
        (NESTED, {"include": ["ema"]}, "ema: selects nothing of the state dict; there are model, counters"),
        (FLAT, {"include": ["modle"]}, "modle: matches no key; perhaps 'model' is meant; there are model, optimizer"),
        (FLAT, {"include": ["moddel", "optimizer"]}, "moddel: matches no key; perhaps 'model' is meant"),
    ],
)
def test_a_filter_that_selects_nothing_is_refused(
    tmp_path: Path, saved: dict[str, Any], filters: dict[str, list[str]], text: str, takes_policy: bool
) -> None:
    tte.save(saved, tmp_path)
    planner = tte.LoadPlanner(source=Source(**filters), policy=ElasticPolicy() if takes_policy else None)
    target = zeros_like(saved)
    with pytest.raises(ReshardError, match=re.escape(text)) as refused:
        tte.load(target, tmp_path, planner=planner)
    assert "Filters that select nothing (1)" in str(refused.value)


@pytest.mark.parametrize("filters", [{"include": ["*lora*", "*"]}, {"exclude": ["*.lora", "ema"]}])
def test_filters_for_another_job_are_warned_of(tmp_path: Path, filters: Any) -> None:
    tte.save(NESTED, tmp_path)
    target = zeros_like(NESTED)
    with pytest.warns(UserWarning, match="of the source matches no key; there are model, counters"):
        tte.load(target, Source(tmp_path, **filters))
    assert target["model"]["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("filters", "loaded"),
    [
        ({"include": ["model"]}, ["layers.0.w", "norm"]),
        ({"exclude": ["model"]}, ["optimizer.step"]),
        ({"include": ["model", "optimizer"]}, ["layers.0.w", "norm", "optimizer.step"]),
        ({"include": ["model"], "exclude": ["norm"]}, ["layers.0.w"]),
        ({"include": ["norm"]}, ["norm"]),
    ],
)
@pytest.mark.parametrize("policy", [None, ElasticPolicy(), ElasticPolicy({"optimizer": "keep"}, strict="ignore")])
def test_tensors_at_the_top_are_the_component_model_of_a_source_too(
    tmp_path: Path, filters: Any, loaded: list[str], policy: ElasticPolicy | None
) -> None:
    tte.save(FLAT, tmp_path)
    target = zeros_like(FLAT)
    tte.load(target, tmp_path, planner=tte.LoadPlanner(source=Source(**filters), policy=policy))
    values = {"layers.0.w": target["layers.0.w"], "norm": target["norm"], "optimizer.step": target["optimizer"]["step"]}
    assert [key for key, value in values.items() if value.any()] == loaded


@pytest.mark.parametrize("policy", [ElasticPolicy({"model": "reset"}), ElasticPolicy({"step": "reset"})])
def test_a_tensor_beside_an_entry_named_model_is_a_component_of_its_own(tmp_path: Path, policy: ElasticPolicy) -> None:
    saved = {"model": {"w": torch.ones(3)}, "step": torch.ones(2)}
    tte.save(saved, tmp_path)
    target = zeros_like(saved)
    report = tte.load(target, tmp_path, policy=policy)
    assert report is not None
    loaded = {line.name for line in report.components if line.outcome == "1 entry"}
    assert loaded == {"model", "step"} - set(policy.actions)
    assert target["step"].any() == ("step" in loaded) and target["model"]["w"].any() == ("model" in loaded)
