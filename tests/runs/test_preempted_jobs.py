"""Real jobs of torchrun that are asked to leave at random moments resume at the step that their ranks agreed on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from preempted_job import EVERY, STOPPED, loss_of, train
from tier import SEED, num_cases

from torchtitan_ext.storage.inspect.verify import find_damage

JOB = Path(__file__).parents[1] / "harness" / "preempted_job.py"
NUM_JOBS = num_cases(4)
NUM_STEPS = 60


def random_plan(seed: str, num_ranks: int) -> dict[str, Any]:
    """One signal or several, of which some come before the first step."""
    draw = random.Random(seed)
    kinds = draw.choices(["SIGTERM", "SIGUSR1", "request"], k=draw.choice([1, 1, 2, 4]))
    begin = draw.choice([0.0, 0.05, draw.uniform(0, 2)])
    requests = [[draw.randrange(num_ranks), begin + draw.choice([0, 0.01, 1]), kind] for kind in kinds]
    return {"seed": seed, "num_steps": NUM_STEPS, "asynchronous": draw.random() < 0.7, "requests": requests}


def losses_of_a_run() -> list[float]:
    losses, weight = [], 0.0
    for step in range(1, NUM_STEPS + 1):
        losses.append(loss_of(step, weight))
        weight += losses[-1]
    return losses


def run_torchrun(folder: Path, number: int, num_ranks: int) -> int:
    """Rank 0 hosts the store in half of the jobs, and may end first; torchrun's agent does in the others."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [sys.executable, *launch, str(JOB), str(folder)],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(number // 2 % 2)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or f"exitcode: {STOPPED}" in done.stderr, done.stderr[-4000:]
    return done.returncode


def journals_of(folder: Path, num_ranks: int, life: int) -> list[list[dict[str, Any]]]:
    files = [folder / f"journal-{life}-{rank}" for rank in range(num_ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def go_on(rank: int, world_size: int, folder: str) -> bool:
    return train(Path(folder), json.loads((Path(folder) / "plan.json").read_text()), 1)


@pytest.mark.nightly("servers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(NUM_JOBS))
def test_a_job_leaves_at_one_step_and_resumes_there(
    run_world: Callable[..., list[bool]], tmp_path: Path, number: int
) -> None:
    sizes = [2 if number % 2 == 0 else 4, 1 + number % 3]
    plan = random_plan(f"{SEED} {number}", sizes[0])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code = run_torchrun(tmp_path, number, sizes[0])
    assert run_world(sizes[1], go_on, str(tmp_path)) == [False] * sizes[1]
    expected, at = losses_of_a_run(), 0
    for life, size in enumerate(sizes):
        journals = journals_of(tmp_path, size, life)
        ends = {(line["step"], line["stopped"]) for journal in journals for line in journal if line["what"] == "left"}
        assert len(ends) == 1 and all(journal[-1]["what"] in ("left", "closed") for journal in journals), (plan, ends)
        ((end, is_stopped),) = ends
        assert is_stopped == (life == 0 and code != 0)
        for journal in journals:
            assert journal[0] == {"what": "resumed", "step": at}, plan
            losses = [(line["step"], line["loss"]) for line in journal if line["what"] == "step"]
            assert losses == [(step, expected[step - 1]) for step in range(at + 1, end + 1)], plan
        # A run that was asked too late ends by itself, and was last saved where its steps say.
        at = end if is_stopped else NUM_STEPS // EVERY * EVERY
    assert end == NUM_STEPS
    steps = sorted((tmp_path / "run").glob("step-*"))
    assert steps and not any(find_damage(step) for step in steps), plan


@pytest.mark.nightly("pages")
def test_the_program_of_the_page_leaves_by_the_signal_of_torchrun(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "use" / "preemption.md").read_text()
    program, shown = re.findall(r"```python\n# train.py\n(.*?)```\n```\n(.*?)```", page, re.S)[0]
    (tmp_path / "train.py").write_text(program.replace("/tmp/", f"{tmp_path}/"))
    commands = [line[2:].replace(" &", "").split() for line in shown.splitlines() if line.startswith("$ torchrun")]
    assert [command[0] for command in commands] == ["torchrun", "torchrun"] and "\n$ kill -TERM %1\n" in shown
    first, second = [[sys.executable, "-m", "torch.distributed.run", "--standalone", *line[1:]] for line in commands]
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(first, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
        eventually(lambda: job.poll() is not None or (tmp_path / "job" / "step-50").is_dir())
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate()
        log.seek(0)
        told = log.read()
    ends = re.findall(r"from step 0 to (\d+), saved (\d+)\n", said)
    assert len(ends) == 2 and len({*ends[0], *ends[1]}) == 1, told[-4000:]
    assert job.returncode == 1 and 50 < int(ends[0][0]) < 150
    # The save of step 50 may still count as pending: its directory is there before its ranks have heard of it.
    line = re.search(
        r"SIGTERM at rank \d: at step (\d+) all ranks (wait for .*, )?save this step,? and stop[:;] ", told
    )
    assert line is not None and line[1] == ends[0][0], told[-4000:]
    done = subprocess.run(second, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"from step {ends[0][0]} to 150, saved 150\n" * 2
