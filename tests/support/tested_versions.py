"""Which torch and Python were tested: a plugin that writes a row of the table in CONTRIBUTING.md.

pytest -p tested_versions --tested-versions "what was run"
"""

import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
HEAD = "| torch | Python | what | passed | failed | skipped | when | commit |\n|---|---|---|---|---|---|---|---|\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tested-versions", metavar="WHAT", help="write a row into CONTRIBUTING.md")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    what = config.getoption("--tested-versions")
    if what is None or hasattr(config, "workerinput"):  # a worker of xdist has counts of its own
        return
    counts = [len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "skipped")]
    counts[1] += len(terminalreporter.stats.get("error", []))
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    when = f"{datetime.now(timezone.utc).strftime('%Y-%m-%d')} | {git.stdout.strip()}"
    PAGE.write_text(with_row(PAGE.read_text(), [torch.__version__, platform.python_version(), what], counts, when))


def with_row(page: str, key: list[str], counts: list[int], when: str) -> str:
    """The page with this row first, in the place of an older one of the same torch, Python and tests."""
    before, head, after = page.partition(HEAD)
    assert head, f"{PAGE} has no table of versions"
    start = f"| {' | '.join(key)} |"
    row = f"{start} {' | '.join(map(str, counts))} | {when} |\n"
    return before + head + row + re.sub(rf"^{re.escape(start)}.*\n", "", after, flags=re.M)
