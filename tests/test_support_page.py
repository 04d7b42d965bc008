"""The blocks of tests/support/README.md are tests, and pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.sampled(0)
def test_the_blocks_of_the_page_are_tests_that_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (TESTS / "support" / "README.md").read_text(), re.S)
    for number, block in enumerate(blocks):
        (tmp_path / f"test_block_{number}.py").write_text(block)
    fixtures = ["-p", "conftest", "-p", "storage.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *fixtures, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'support'}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and f"{len(blocks)} passed" in done.stdout, done.stdout + done.stderr
