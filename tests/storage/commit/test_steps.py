"""Names of a run's steps: patterns, which of them are known, and what a run is taken for."""

from pathlib import Path

import pytest

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.commit.steps import StepPattern, find_steps, patterns_in, step_of, step_paths


@pytest.mark.parametrize(
    ("pattern", "name", "number"),
    [
        ("step-{step}", "step-7", 7),
        ("step-{step}", "step-007", None),
        ("step-{step}", "step-7.bak", None),
        ("step-{step}", "step-\u0667", None),  # a digit of another alphabet
        ("iter_{step:07d}", "iter_0000100", 100),
        ("iter_{step:07d}", "iter_12345678", 12345678),
        ("iter_{step:07d}", "iter_100", None),
        ("epoch=*-step={step}", "epoch=3-step=100", 100),
        ("epoch=*-step={step}", "epoch=3", None),
        ("a.b{step}c", "a.b5c", 5),
        ("a.b{step}c", "axb5c", None),
    ],
)
def test_a_pattern_reads_names(pattern: str, name: str, number: int | None) -> None:
    assert StepPattern(pattern).number_of(name) == number


@pytest.mark.parametrize("text", ["", "step-", "{step}{step}", "{step!r}", "run/{step}", "{epoch}-{step}", "{step:x}"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(WrongValueError, match="expected a name such as 'checkpoint-{step}'"):
        StepPattern(text)


def run_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("step-5", "checkpoint-7", "step-x"), {5: "step-5"}),  # a run of ours stays what it was
        (("checkpoint-500", "checkpoint-1000", "runs"), {500: "checkpoint-500", 1000: "checkpoint-1000"}),
        (("global_step_10", "logs"), {10: "global_step_10"}),
        (("global_step10",), {10: "global_step10"}),
        (("iter_0000100", "iter_0000200"), {100: "iter_0000100", 200: "iter_0000200"}),
        (("epoch=3-step=100", "epoch=4-step=200"), {100: "epoch=3-step=100", 200: "epoch=4-step=200"}),
        (("epoch=3", "epoch=4"), {3: "epoch=3", 4: "epoch=4"}),
        (("checkpoint-5", "step_5"), {}),  # which of them is not told
        (("tmp-1", "v2"), {}),
    ],
)
def test_names_of_other_trainers_are_known_where_they_are_of_one_kind(
    tmp_path: Path, names: tuple[str, ...], found: dict[int, str]
) -> None:
    run = run_of(tmp_path, *names)
    assert {number: path.name for number, path in step_paths(run).items()} == found
    assert find_steps(run) == dict.fromkeys(found, False)
    for number, name in found.items():
        assert step_of(run / name) == number


def test_a_pattern_that_is_given_is_the_only_one(tmp_path: Path) -> None:
    run = run_of(tmp_path, "step-5", "checkpoint-7", "ckpt_9_best")
    assert list(step_paths(run, "checkpoint-{step}")) == [7]
    assert step_paths(run, "ckpt_{step}_*") == {9: run / "ckpt_9_best"}
    assert step_of(run / "ckpt_9_best", "ckpt_{step}_*") == 9 and step_of(run / "ckpt_9_best") is None
    assert [pattern.text for pattern in patterns_in(run_of(tmp_path / "b", "checkpoint-5", "step_5"))] == [
        "step_{step}",
        "checkpoint-{step}",
    ]
