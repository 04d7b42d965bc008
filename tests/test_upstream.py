"""The programs of docs/reference/upstream.md: with stock they fail as it says, with ``install`` they end."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan_ext as tte

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "upstream.md").read_text()
PREAMBLE, *PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
FIRST_LINE = re.compile(r"# (\d) process(?:es)?; stock: (.*?)(; as with us)?\n")
TITLES = re.findall(r"^### (.*)", PAGE, re.M)


def outcome(rank: int, world_size: int, code: str, is_installed: bool) -> str:
    """What a program raises on this rank; nothing where it ends."""
    if is_installed:
        tte.install()
    try:
        exec(code, {})
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit:
        pass
    finally:
        tte.integrations.uninstall()
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS, ids=TITLES)
def test_the_programs_fail_with_stock_only(run_world: Callable[..., Any], tmp_path: Path, program: str) -> None:
    first_line = FIRST_LINE.match(program)
    assert first_line is not None, program
    num_processes, words, as_with_us = first_line.groups()
    for is_installed in (False, True)[: 1 + ("dcp." in program)]:
        folder = tmp_path / str(is_installed)
        folder.mkdir()
        code = (PREAMBLE + program).replace("/tmp/", f"{folder}/")
        outcomes = run_world(int(num_processes), outcome, code, is_installed)
        if is_installed and not as_with_us:
            assert set(outcomes) == {""}
        else:
            assert any(words in said for said in outcomes), f"fixed upstream: drop the section. Got {outcomes}"


def test_each_section_has_its_program() -> None:
    assert len(TITLES) == len(PROGRAMS) > 20
