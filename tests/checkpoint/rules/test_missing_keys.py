"""A key that the checkpoint lacks comes with the name that was perhaps meant, and with the rename that mends it."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.missing_keys import missing_problems, unexpected_problems
from torchtitan_ext.elastic import ElasticPolicy, Source
from torchtitan_ext.errors import MissingStateError, ReshardError, StateRefusedError
from torchtitan_ext.state.value_digest import digest_value


def metadata_of(keys: list[str]) -> Metadata:
    return Metadata({key: TensorStorageMetadata(TensorProperties(), torch.Size([1]), []) for key in keys})


def details(missing: list[str], saved: list[str], num_ranks: int = 1) -> list[str]:
    return [problem.detail for problem in missing_problems(missing, metadata_of(saved), num_ranks)]


def rename_of(text: str) -> dict[str, str]:
    """What the message says to pass."""
    found = re.search(r"LoadPlanner\(source=(Source\(rename=.*?\}\))\)", text)
    return {} if found is None else dict(eval(found.group(1)).rename)


@pytest.mark.parametrize(
    ("missing", "saved", "rename"),
    [
        (["w", "b"], ["module.w", "module.b"], {"*": "module.*"}),
        (["module.w", "module.b"], ["w", "b"], {"module.*": "*"}),
        (["model.l.w"], ["model.module.l.w", "optimizer.lr"], {"model.*": "model.module.*"}),
        (["model._orig_mod.l.w"], ["model.l.w", "step"], {"model._orig_mod.*": "model.*"}),
        (["l.w", "l.b"], ["model.l.w", "model.l.b"], {"*": "model.*"}),
        (["net.l.w"], ["l.w"], {"net.*": "*"}),
        # A name at the top that the checkpoint has keeps it.
        (
            ["l.w", "l.b", "n.w"],
            ["module.l.w", "module.l.b", "module.n.w", "step"],
            {"l.*": "module.l.*", "n.*": "module.n.*"},
        ),
        (["w"], ["module.w", "step"], {"w": "module.w"}),
        # Each layer its own: too long for a message.
        ([f"l.{i}.w" for i in range(9)], [f"l.{i}._orig_mod.w" for i in range(9)], {}),
    ],
)
def test_a_prefix_that_differs_comes_with_the_rename_that_mends_it(
    missing: list[str], saved: list[str], rename: dict[str, str]
) -> None:
    for fqn, text in zip(missing, details(missing, saved), strict=True):
        assert "which differs only by prefix" in text and rename_of(text) == rename
        if rename:
            assert Source(rename=rename).saved_name(fqn) in saved
    kept = set(saved) - {Source(rename=rename).saved_name(fqn) for fqn in missing}
    assert {Source(rename=rename).saved_name(key) for key in kept} == kept or not rename


def test_two_names_with_the_same_end_are_no_twins() -> None:
    (text,) = details(["w"], ["encoder.w", "decoder.w"])
    assert text == "Missing key in checkpoint state_dict: w."


def test_the_nearest_name() -> None:
    assert details(["model.wieght"], ["model.weight", "other"])[0].endswith("model.wieght. Nearest: model.weight.")


def test_entries_of_ranks_are_one_problem_that_names_both_worlds() -> None:
    (text,) = details([f"data.dp_rank_{rank}" for rank in (2, 3)], ["data.dp_rank_0", "data.dp_rank_1"], num_ranks=4)
    assert "It, and others up to data.dp_rank_3, are of ranks that the save did not have" in text
    assert "the checkpoint has 2 of these, data.dp_rank_0 and so on, this load has 4 rank(s)" in text


def test_hints_stop_where_the_report_does() -> None:
    texts = details([f"layer{i}" for i in range(12)], [f"layer{i}_" for i in range(12)])
    assert [" Nearest: " in text for text in texts] == [True] * 10 + [False] * 2


def test_an_unexpected_key_names_the_one_that_was_perhaps_meant() -> None:
    near, far = unexpected_problems(["model.weight", "x"], ["model.wieght"])
    assert near.detail == "it is in the checkpoint and nothing asks for it; nearest that is asked for: model.wieght"
    assert far.detail == "it is in the checkpoint and nothing asks for it"


@pytest.mark.parametrize("options", [{}, {"policy": tte.elastic.ElasticPolicy()}], ids=["plain", "policy"])
def test_the_rename_of_the_message_loads(tmp_path: Path, options: dict[str, Any]) -> None:
    tte.save({"module.w": torch.ones(3), "module.b": torch.zeros(2)}, tmp_path)
    target = {"w": torch.zeros(3), "b": torch.ones(2)}
    with pytest.raises(MissingStateError) as refused:
        tte.load(target, tmp_path, **options)
    tte.load(target, tmp_path, planner=tte.LoadPlanner(source=Source(rename=rename_of(str(refused.value)))), **options)
    assert target["w"].tolist() == [1.0] * 3 and target["b"].tolist() == [0.0] * 2


def stepped_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_dropped_moments_are_refused_with_a_cure_that_works(tmp_path: Path) -> None:
    model, optimizer = stepped_optimizer()
    tte.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(ReshardError, match="get_optimizer_state_dict") as refused:
        tte.load({"optimizer": fresh}, tmp_path)
    text = str(refused.value)
    assert "optimizer.state.0.step, optimizer.state.0.exp_avg" in text and "{'optimizer.state.*': 'omit'}" in text
    assert not fresh.state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without = ElasticPolicy({"optimizer.state.*": "omit"})
        tte.load({"optimizer": torch.optim.AdamW(model.parameters())}, tmp_path, policy=without)
        model.zero_grad()
        get_optimizer_state_dict(model, fresh)
        tte.load({"optimizer": fresh}, tmp_path)
    assert digest_value(fresh.state_dict()) == digest_value(optimizer.state_dict())


def test_what_is_not_asked_for_at_all_is_not_warned_of(tmp_path: Path) -> None:
    saved = {"w": torch.ones(3), "b": torch.ones(2), "model": {"w": torch.ones(3), "b": 1}, "optimizer": {"lr": 0.1}}
    tte.save(saved, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tte.load({"w": torch.zeros(3)}, tmp_path)
        tte.load({"model": {"w": torch.zeros(3), "b": 0}}, tmp_path)
        tte.load({"model": {"w": torch.zeros(3)}}, tmp_path, planner=tte.LoadPlanner(allow_unclaimed=["model.b"]))
    with pytest.warns(
        UserWarning, match="load: saved entries of model that nothing asks for are not loaded: model.b; put targets"
    ):
        tte.load({"model": {"w": torch.zeros(3)}}, tmp_path)


@pytest.mark.parametrize("policy", [None, ElasticPolicy()])
def test_an_object_below_the_top_is_to_be_given_as_its_state(tmp_path: Path, policy: ElasticPolicy | None) -> None:
    model = torch.nn.Linear(3, 2)
    words = re.escape("Linear below the top of a state dict is not asked for its state: pass its state_dict()")
    with pytest.warns(UserWarning, match=rf"app.model \(torch.nn.modules.linear.Linear: {words}\)"):
        tte.save({"app": {"model": model}}, tmp_path / "object")
    tte.save({"app": {"model": model.state_dict()}}, tmp_path / "state")
    with pytest.raises(StateRefusedError, match=rf"Missing key in checkpoint state_dict: app.model. {words}"):
        tte.load({"app": {"model": model}}, tmp_path / "state", policy=policy)
