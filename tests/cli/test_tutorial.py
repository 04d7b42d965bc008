"""docs/use/tutorial.md: its script is the example, and its commands, run in their order, print what it shows."""

import os
import re
import shlex
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from calls import call
from test_cli_docs import plain, shown
from test_readme import GLOO_AT_EXIT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use" / "tutorial.md").read_text()
STEPS = [
    (command, output)
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.S)
    for command, output in re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", block, re.M)
]


def run(command: str) -> str:
    """What a command prints; a job as its processes, the commands of the package in this process."""
    done = []
    for words in map(shlex.split, command.split(" && ")):
        if words[0] == "torchrun":
            return run_job(words[1:])
        assert words[0] == "torchtitan-ext"
        done.append(call(*words[1:]))
        if done[-1].code:
            break
    return "".join(map(shown, done))


def run_job(words: list[str]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    # Of Python's end under gloo; by then the job has saved.
    assert done.returncode == 0 or GLOO_AT_EXIT in done.stderr, done.stderr[-3000:]
    return done.stdout


def without_numbers(text: str) -> list[str]:
    """Sizes of pickles, losses and numbers of an optimizer's options are those of a version of torch."""
    return [re.sub(r"\d[\d.,]*", "<n>", line) for line in plain(text)]


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", text, re.M)]


def test_the_script_is_the_example() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert script == (ROOT / "examples" / "first_hour.py").read_text()


def test_the_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    printed = {}
    for command, output in STEPS:
        printed[command] = run(command)
        # A command may say more at the end of a line than the page has room for.
        for line, wanted in zip_longest(without_numbers(printed[command]), without_numbers(output), fillvalue=""):
            assert wanted and line.startswith(wanted), (command, line)
    first, second = (text for command, text in printed.items() if command.startswith("torchrun"))
    before, after = losses(first), losses(second)
    assert len(before) == len(after) == 4 and max(after) < min(before), "the second job goes on where the first ended"
    assert "step 4, 48 samples seen" in second and "saved run/step-8" in second
    assert printed["torchtitan-ext diff run/step-4 one-rank"].startswith("0 keys differ")
    assert os.listdir("run") == ["step-8"], "verify, then gc"


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"\]\(\.\./(pictures/[^)]+)\)", PAGE)
    assert len(pictures) == 2 and all((ROOT / "docs" / picture).exists() for picture in pictures)
