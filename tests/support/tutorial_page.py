"""The commands of docs/use/tutorial.md, run in their order, and what the page shows of them."""

import re
import shlex
from pathlib import Path

from calls import call, shown
from gloo_worlds import GLOO_AT_EXIT
from warm_processes import torchrun

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "use" / "tutorial.md"
PAGE = PATH.read_text()
_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.S)
_COMMAND = re.compile(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", re.M)
STEPS = [step for block in _BLOCK.findall(PAGE) for step in _COMMAND.findall(block)]
"""Each command with its output."""


def run(command: str) -> str:
    """What a command prints; a job as its processes, the commands of the package in this process."""
    done = []
    for words in map(shlex.split, command.split(" && ")):
        if words[0] == "torchrun":
            return _run_job(words[1:])
        assert words[0] == "torchtitan-ext"
        done.append(call(*words[1:]))
        if done[-1].code:
            break
    return "".join(map(shown, done))


def page_of(printed: dict[str, str]) -> str:
    """The page with what the commands have printed in the place of what it shows."""
    return _BLOCK.sub(lambda block: _COMMAND.sub(lambda step: f"$ {step[1]}\n{printed[step[1]]}", block[0]), PAGE)


def _run_job(words: list[str]) -> str:
    assert words[0] == "--nproc-per-node"
    done = torchrun(int(words[1]), *words[2:])
    assert done.returncode == 0 or GLOO_AT_EXIT in done.stderr, done.stderr[-3000:]
    return done.stdout
