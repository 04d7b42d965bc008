"""Ray Train with our checkpoints: real jobs of workers that are lost, resized and attacked, beside one that is not.

All jobs of Ray are in this file, so one after the other (``--dist loadfile``): with two clusters on a machine, Ray's
``PlacementGroupCleaner`` asks the newer one for its controller, does not find it, and takes the job's workers away.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train", reason="`make clients` installs Ray", exc_type=ImportError)

pytestmark = [pytest.mark.nightly("servers"), pytest.mark.timeout(1200)]

JOB = Path(__file__).parents[1] / "harness" / "ray_job.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


class Job:
    """What a job of ``ray_job.py`` has written."""

    def __init__(self, folder: Path, scenario: str) -> None:
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, JOB, folder, scenario], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout[-20000:]
        self.output = done.stdout
        self.ray = json.loads((folder / "result.json").read_text())
        self.steps_on_disk = sorted(path.name for path in (folder / "storage" / "run").glob("step-*"))
        self.resumed: list[Any] = []
        """Of each attempt: the number of workers, and the step from which it went on."""
        attempts: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for path in folder.glob("*.jsonl"):
            first, *lines = map(json.loads, path.read_text().splitlines())
            if path.stem.endswith("-0"):
                self.resumed.append((first["attempt"], first["num_workers"], first["resumed"]))
            for line in lines:
                attempts[first["attempt"]][line["step"]].append(line)
        self.resumed = [where for _, *where in sorted(self.resumed)]
        trained: dict[int, list[dict[str, Any]]] = {}
        for attempt in sorted(attempts):
            trained |= attempts[attempt]  # what an earlier attempt has done of these steps is lost
        self.trained = dict(sorted(trained.items()))

    @property
    def samples(self) -> dict[int, list[int]]:
        """The samples of each step's global batch, in the attempt that counts."""
        return {
            step: sorted(sample for line in lines for sample in line["ids"]) for step, lines in self.trained.items()
        }

    @property
    def losses(self) -> list[float]:
        return [sum(line["loss"] for line in lines) / len(lines) for lines in self.trained.values()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ray") / "undisturbed", "undisturbed")


def check_is_as(job: Job, undisturbed: Job) -> None:
    """The same samples in each step, and the same losses, up to the order of reductions."""
    assert list(job.trained) == list(range(1, 21))
    assert job.samples == undisturbed.samples
    assert job.losses == pytest.approx(undisturbed.losses, rel=1e-4)


def test_an_undisturbed_job_reports_each_step_with_its_checkpoint(undisturbed: Job) -> None:
    assert undisturbed.resumed == [[4, 0]]
    assert sorted(sum((undisturbed.samples[step] for step in range(1, 10)), [])) == list(range(72))
    assert undisturbed.losses[-1] < undisturbed.losses[0] / 10
    assert undisturbed.ray == {"latest": ["step-20", 20], "listed": [["step-16", 16], ["step-20", 20]]}
    assert undisturbed.steps_on_disk == ["step-16", "step-20"], "Ray removes the others"


def test_a_job_that_loses_a_node_and_gets_another_goes_on_as_if_nothing_had_happened(
    undisturbed: Job, tmp_path: Path
) -> None:
    """4 workers, of which 2 are killed, then 2, then 4 again."""
    job = Job(tmp_path / "resized", "resized")
    assert job.resumed == [[4, 0], [2, 4], [4, 12]]
    check_is_as(job, undisturbed)
    assert job.ray == undisturbed.ray and job.steps_on_disk == undisturbed.steps_on_disk


def test_a_job_saves_before_a_node_is_taken(undisturbed: Job, tmp_path: Path) -> None:
    job = Job(tmp_path / "drained", "drained")
    assert job.resumed == [[4, 0], [2, 6]], "a step that was not due"
    check_is_as(job, undisturbed)
    assert job.ray == undisturbed.ray


def test_a_job_goes_on_after_each_attack(undisturbed: Job, tmp_path: Path) -> None:
    """See ``ray_job.attack``: an error of the loop, a disk that is full, a death in a save and one before the report,
    and a damaged step."""
    job = Job(tmp_path / "attacked", "attacked")
    assert job.resumed == [[2, 0], [2, 4], [2, 4], [2, 4], [2, 12], [2, 12]]
    check_is_as(job, undisturbed)
    assert "an error of the user's own" in job.output and "no space" in job.output
    assert job.ray == {"latest": ["step-20", 20], "listed": [["step-16", 16], ["step-20", 20]]}
    assert job.steps_on_disk == ["step-16", "step-20"]


def test_one_worker_trains_on_where_storage_refuses_a_step(undisturbed: Job, tmp_path: Path) -> None:
    job = Job(tmp_path / "refused", "refused")
    assert job.resumed == [[1, 0]]
    check_is_as(job, undisturbed)
    assert job.ray == {"latest": ["step-20", 20], "listed": [[f"step-{step}", step] for step in (4, 12, 16, 20)]}
    assert job.steps_on_disk == ["step-12", "step-16", "step-20", "step-4"]


def losses_of_the_example(path: Path, num_workers: int, num_steps: int) -> dict[int, float]:
    command = [sys.executable, EXAMPLE, path, str(num_workers), str(num_steps)]
    environment = {**os.environ, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}  # a report waits for the next one
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = re.findall(r"^step (\d+): loss (\d+\.\d{4})$", done.stdout, re.M)
    return {int(step): float(loss) for step, loss in lines}


def test_the_example_goes_on_with_other_workers(tmp_path: Path) -> None:
    first, both = (losses_of_the_example(tmp_path / "run", *numbers) for numbers in [(4, 3), (2, 6)])
    assert list(first) == [1, 2, 3] and list(both) == [1, 2, 3, 4, 5, 6]
    assert both == pytest.approx(losses_of_the_example(tmp_path / "same", 2, 6), abs=2e-4)  # of the last digit printed
