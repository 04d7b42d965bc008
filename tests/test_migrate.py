"""Calls of 0.1 do what the calls do that docs/use/migrate.md shows beside them, and say so."""

import enum
import inspect
import os
import re
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy
from torchtitan_ext.errors import MissingStateError, WrongValueError
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.commit.steps import folders_in_fallback
from torchtitan_ext.transforms import Rule, Transform

PAGE = (Path(__file__).parents[1] / "docs" / "use" / "migrate.md").read_text()
ROWS = re.findall(r"^\| `(.*?)` \| `(.*?)` \|$", PAGE, re.M)
CALLS = [row for row in ROWS if "(" in row[0]]
NAMES = [row for row in ROWS if "(" not in row[0]]


class Colour(enum.Enum):
    RED = 1


def run(code: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What a call has left, and its warnings that something is old."""
    folder.mkdir()
    os.chdir(folder)
    for step in (1, 2, 4, 100):
        tte.save({"w": torch.full((3,), float(step)), "colour": Colour.RED}, f"run/step-{step}")
    tte.save({"w": torch.ones(3), "colour": Colour.RED}, "saved/step-1")
    of_run = folders_in_fallback("saved", "other")[0]
    tte.save({"w": torch.full((3,), 2.0), "colour": Colour.RED}, f"{of_run}/step-2")
    state = {"w": torch.full((3,), 5.0)}
    names = {
        "tte": tte,
        "Colour": Colour,
        "state": {**state, "colour": None} if "allow_classes" in code else state,
        "weights": {"a": torch.arange(12.0), "b": torch.ones(9)},
        "rename": Transform([Rule("*", "model.*")]),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(code, names)
    old = [str(one.message) for one in caught if issubclass(one.category, DeprecationWarning)]
    left = {"state": names["state"], "steps": sorted(os.listdir("run"))}
    if os.path.exists("out"):
        left["files"] = {path.name: path.read_bytes() for path in sorted(Path("out").iterdir())}
    if os.path.exists("run/step-5"):
        tte.load(read := {"w": torch.zeros(3)}, "run/step-5")
        left["saved"] = read
    return left, old


@pytest.mark.filterwarnings("ignore:a load will refuse", "ignore:load. saved entries", "ignore:save. the run goes on")
@pytest.mark.parametrize(("old", "new"), CALLS)
def test_both_calls_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.chdir(tmp_path)
    (before, said), (after, nothing) = run(old, tmp_path / "old"), run(new, tmp_path / "new")
    assert before["steps"] == after["steps"]
    assert digest_value(before) == digest_value(after)
    assert "saved" in before or "files" in before or not torch.equal(before["state"]["w"], torch.full((3,), 5.0))
    assert said and not nothing
    given = re.findall(r"(\w+)=", old.replace("step=", ""))
    assert all(any(option in text for text in said) for option in given if option != "every")
    function = re.search(r"tte\.(CheckpointManager|weights\.\w+|LoadPlanner)\(", new)
    assert function is not None and all(function[0] in text for text in said)


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_a_name_of_old_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(new.replace("tte.", "torchtitan_ext."))):
        found = eval(old)
    assert found is eval(new)


def test_all_names_that_moved_are_on_the_page() -> None:
    assert {old for old, _ in NAMES} == {f"tte.{name}" for name in tte._MOVED}
    assert len(CALLS) >= 10


def test_calls_have_few_options() -> None:
    counts = {}
    for call in (tte.save, tte.async_save, tte.load):
        parameters = inspect.signature(call).parameters.values()
        counts[call.__name__] = sum(one.kind is one.KEYWORD_ONLY for one in parameters)
        get_type_hints(call)
    assert counts == {"save": 10, "async_save": 11, "load": 14}


def test_the_warning_points_at_the_caller(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning) as caught:
        tte.save({"w": torch.ones(2)}, tmp_path / "step-1", keep=1)
        tte.load({"w": torch.ones(2)}, tmp_path, step=1, fallback=tmp_path / "other")
        tte.async_save({"w": torch.ones(2)}, tmp_path / "step-2", retries=1).result()
    assert [one.filename for one in caught] == [__file__] * 3


def test_other_options_are_none(tmp_path: Path) -> None:
    for call in (tte.save, tte.async_save, tte.load):
        with pytest.raises(TypeError, match="unexpected keyword argument 'kep'"):
            call({"w": torch.ones(2)}, tmp_path, kep=1)


def test_a_part_of_a_checkpoint_is_loaded_by_default(tmp_path: Path) -> None:
    tte.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "step": 1}, tmp_path)
    with pytest.warns(UserWarning, match="saved entries of model that nothing asks for are not loaded: model.b"):
        report = tte.load({"model": {"a": torch.zeros(2)}}, tmp_path)
    assert report.unexpected == ("model.b",) and "model  reshard  1 entry, 1 unexpected" in str(report)
    with pytest.raises(MissingStateError, match="model.c"):
        tte.load({"model": {"a": torch.zeros(2), "c": torch.zeros(2)}}, tmp_path)
    tte.load({"model": {"a": torch.zeros(2)}}, tmp_path, policy=ElasticPolicy(unexpected="ignore"))
    with pytest.raises(WrongValueError, match="got unexpected='keep'"):
        ElasticPolicy(unexpected="keep")  # type: ignore[arg-type]
    policy = ElasticPolicy({"a": "omit"}, strict="ignore", unexpected="warn")
    assert eval(repr(policy)).unexpected == "warn" and policy.with_actions({}).unexpected == "warn"
