"""The table of wrong changes fits the code that it changes."""

from pathlib import Path

import pytest
from mutants.generate import KINDS, NUM_EACH, changed, drawn
from mutants.judges import ROOT, judges_of
from mutants.wrong_changes import WRONG_CHANGES, WrongChange


@pytest.mark.parametrize("one", WRONG_CHANGES, ids=lambda one: one.name)
def test_the_old_text_stands_once_in_its_file(one: WrongChange) -> None:
    assert (ROOT / one.file).read_text().count(one.old) == 1
    assert one.old != one.new


def test_the_judges_are_there() -> None:
    generated = [judges_of(next(drawn(language, 0)).file) for language in ("python", "cpp")]
    for judge in {judge for judges in (*generated, *(one.judges for one in WRONG_CHANGES)) for judge in judges}:
        file, _, test = judge.partition("::")
        path = ROOT / file if "/" in judge else ROOT / f"tests/csrc/{judge}.cpp"
        assert path.is_file(), judge
        assert f"def {test}" in path.read_text() or not test, judge


def test_there_are_sixty_and_hardly_any_waits_for_the_night() -> None:
    assert len({one.name for one in WRONG_CHANGES}) == 60
    assert sum(one.tier == "nightly" for one in WRONG_CHANGES) <= 3
    assert sum(Path(one.file).suffix == ".cpp" for one in WRONG_CHANGES) == 24


@pytest.mark.parametrize("language", ["python", "cpp"])
def test_the_same_mutants_are_drawn_each_time(language: str) -> None:
    edits = [next(drawn(language, number)) for number in range(NUM_EACH)]
    assert len(set(edits)) == NUM_EACH and edits == [next(drawn(language, number)) for number in range(NUM_EACH)]
    assert {edit.kind for edit in edits} == set(KINDS)
    assert all(changed(edit) != (ROOT / edit.file).read_text() for edit in edits)
