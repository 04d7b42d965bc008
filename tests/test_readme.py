"""The README tells the truth: its program fails with stock as it says, and runs in the two ways that it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"

# What a thread of ProcessGroupGloo says when Python ends under it: https://github.com/pytorch/pytorch/issues/190489
GLOO_AT_EXIT = "terminate called without an active exception"


def blocks() -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", README.read_text(), re.DOTALL)


def block_with(text: str) -> str:
    return next(block for block in blocks() if text in block)


def run_on_eight(tmp_path: Path, code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "nine.py"
    script.write_text(code.replace("/tmp/nine", str(tmp_path / "checkpoint")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    for _ in range(3):
        done = subprocess.run(
            [*torchrun, *launcher, str(script)], capture_output=True, text=True, timeout=180, check=False
        )
        if GLOO_AT_EXIT not in done.stderr:
            break
    return done


def test_stock_fails_as_it_says(tmp_path: Path) -> None:
    done = run_on_eight(tmp_path, block_with("# nine.py"))
    assert done.returncode != 0
    assert block_with("AssertionError: req").strip() in done.stderr


@pytest.mark.parametrize("way", ["run", "planner"])
def test_the_other_ways_load(tmp_path: Path, way: str) -> None:
    program = block_with("# nine.py")
    launcher: tuple[str, ...] = ()
    if way == "run":
        launcher = ("-m", "torchtitan_ext.run")
    else:
        lines = block_with("planner=tte.SavePlanner()").splitlines()
        for call, line in zip(("dcp.save(", "dcp.load("), lines, strict=True):
            program = re.sub(rf"^{re.escape(call)}.*$", line, program, flags=re.MULTILINE)
        program = f"import torchtitan_ext as tte\n{program}"
    done = run_on_eight(tmp_path, program, *launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ranks write to one pipe, and the words of two lines may mix.
    assert done.stdout.count("loaded") == done.stdout.count("(9, 3)") == 8
