"""README and docs/use/adoption.md tell the truth: their programs print what they show, with stock and in each way."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gloo_worlds import GLOO_AT_EXIT
from warm_processes import torchrun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ADOPTION = (ROOT / "docs" / "use" / "adoption.md").read_text()


def block_with(text: str, page: str) -> str:
    blocks: list[str] = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    return next(block for block in blocks if text in block)


def run(script: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with its files in the folder of the script."""
    script.write_text(code.replace("/tmp/", f"{script.parent}/"))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)


def run_job(num_ranks: int, script: Path, code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    script.write_text(code.replace("/tmp/", f"{script.parent}/"))
    return torchrun(num_ranks, *launcher, script)


def test_a_run_goes_on_with_other_ranks_and_one_process_loads_from_it(tmp_path: Path) -> None:
    commands = re.findall(r"\$ torchrun --nproc-per-node (\d+) train.py\n(.*\n)", README)
    assert [ranks for ranks, _ in commands] == ["2", "3"]
    for ranks, shown in commands:
        assert run_on(ranks, tmp_path, "train.py") == shown
    done = run(tmp_path / "look.py", block_with("# look.py", README))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == block_with("$ python look.py", README).partition("\n")[2]


def run_on(ranks: str, folder: Path, script: str) -> str:
    """What a program of README prints under torchrun."""
    done = run_job(int(ranks), folder / script, block_with(f"# {script}", README))
    assert done.returncode == 0 or GLOO_AT_EXIT in done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly("pages")
def test_the_operators_do_as_it_says(tmp_path: Path) -> None:
    ((ranks, shown),) = re.findall(r"\$ torchrun --nproc-per-node (\d+) operators.py\n(.*\n)", README)
    assert run_on(ranks, tmp_path, "operators.py") == shown


@pytest.mark.nightly("pages")
def test_stock_fails_as_it_says(tmp_path: Path) -> None:
    done = run_job(8, tmp_path / "nine.py", block_with("# nine.py", ADOPTION))
    assert done.returncode != 0
    assert block_with("AssertionError: req", ADOPTION).strip() in done.stderr


@pytest.mark.nightly("pages")
@pytest.mark.parametrize("way", ["run", "planner"])
def test_the_other_ways_load(tmp_path: Path, way: str) -> None:
    program = block_with("# nine.py", ADOPTION)
    launcher: tuple[str, ...] = ()
    if way == "run":
        launcher = ("-m", "torchtitan_ext.run")
    else:
        lines = block_with("planner=tte.SavePlanner()", ADOPTION).splitlines()
        for call, line in zip(("dcp.save(", "dcp.load("), lines, strict=True):
            program = re.sub(rf"^{re.escape(call)}.*$", line, program, flags=re.MULTILINE)
        program = f"import torchtitan_ext as tte\n{program}"
    done = run_job(8, tmp_path / "nine.py", program, *launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ranks write to one pipe, and the words of two lines may mix.
    assert done.stdout.count("loaded") == done.stdout.count("(9, 3)") == 8
