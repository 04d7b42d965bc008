"""A library that is missing is a skip, and a failure where `make test-clients` has promised it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from pytest import importorskip

def test_needs_it() -> None:
    importorskip("a_library_that_is_missing")

@pytest.fixture
def library() -> None:
    importorskip("a_library_that_is_missing")

def test_has_a_fixture_that_needs_it(library: None) -> None: ...

def test_needs_a_gpu() -> None:
    pytest.skip("no GPU here")
"""
HERE = Path(__file__).parent
MODULE = 'from pytest import importorskip\nimportorskip("a_library_that_is_missing")'


@pytest.mark.parametrize(
    ("promised", "expected"), [("", "4 skipped"), ("1", "1 failed, 1 skipped, 2 errors")], ids=["allowed", "promised"]
)
def test_a_missing_library(tmp_path: Path, promised: str, expected: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_all.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--continue-on-collection-errors", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE / 'support'}", "TTE_REQUIRE_CLIENTS": promised}
    # Elsewhere, or it would read the settings of this project.
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert expected in done.stdout, done.stdout + done.stderr
