"""The programs of tests/upstream fail with stock as their first lines say, and end with ``install``."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan_ext as tte

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reference" / "upstream.md").read_text()
PROGRAMS = sorted(path for path in (TESTS / "upstream").glob("*.py") if path.stem != "preamble")
FIRST_LINE = re.compile(r"# (\d) process(?:es)?; stock: (.*?)(; as with us)?\n")


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
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_programs_fail_with_stock_only(run_world: Callable[..., Any], tmp_path: Path, path: Path) -> None:
    program = path.read_text()
    first_line = FIRST_LINE.match(program)
    assert first_line is not None, program
    num_processes, words, as_with_us = first_line.groups()
    for is_installed in (False, True)[: 1 + ("dcp." in program)]:
        folder = tmp_path / str(is_installed)
        folder.mkdir()
        code = program.replace("/tmp/", f"{folder}/")
        outcomes = run_world(int(num_processes), outcome, code, is_installed)
        if is_installed and not as_with_us:
            assert set(outcomes) == {""}
        else:
            assert any(words in said for said in outcomes), (
                f"fixed upstream: drop its row and {path.name}. Got {outcomes}"
            )


def test_each_program_has_a_row() -> None:
    rows = re.findall(r"^\|.*\| \[(\w+\.py)\]\(\.\./\.\./tests/upstream/\1\) \|$", PAGE, re.M)
    assert len(rows) == len(re.findall(r"^\| (?!with PyTorch)", PAGE, re.M)) > 20
    assert sorted(rows) == [path.name for path in PROGRAMS]
