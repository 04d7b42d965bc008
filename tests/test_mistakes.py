"""docs/use/mistakes.md: its programs print what it shows."""

import re

import pytest
from mistakes_page import PROGRAMS, run


def without_ids(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{8}\b", "<id>", text)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_the_page_shows(number: int) -> None:
    code, shown = PROGRAMS[number]
    assert without_ids(run(code)) == without_ids(shown), "python docs/make_pages.py writes the page anew"


def test_the_page_has_programs() -> None:
    assert len(PROGRAMS) >= 5
