"""torchtitan 0.3.0's own trainer, on CPU: saved by two ranks, resumed by one."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("datasets")
pytest.importorskip("triton")
pytest.importorskip("tokenizers")

from eventually import eventually
from lost_worlds import ask_to_end
from titan_training import OVERRIDES, STEP, command_of, environment_of, make_assets, train

pytestmark = [pytest.mark.nightly("servers"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(("async_mode", "num_workers"), [("disabled", 0), ("async_with_pinned_mem", 2)])
def test_two_ranks_to_one(tmp_path: Path, async_mode: str, num_workers: int) -> None:
    make_assets(tmp_path)
    overrides = [
        "--override.imports",
        f"{OVERRIDES}.elastic_checkpoint",
        f'{OVERRIDES}.elastic_data={{"num_shards": 2}}',
    ]
    workers = [f"--dataloader.num_workers={num_workers}"]
    whole, _ = train(tmp_path, 2, f"--checkpoint.async_mode={async_mode}", *workers, *overrides)
    resumed, log = train(tmp_path, 1, "--checkpoint.load_step=2", *workers, *overrides)
    assert list(whole) == [1, 2, 3] and list(resumed) == [3]
    # Other reduction orders; other data would be some percent off.
    assert resumed[3][0] == pytest.approx(whole[3][0], rel=1e-5) and resumed[3][1] == pytest.approx(
        whole[3][1], rel=1e-3
    )
    assert "saved by 2 ranks (dp_shard 2), loaded by 1 rank (dp_shard 1)" in log
    assert f"step 2, {2 * 4 * 32} tokens of the run" in log


def test_a_last_save_for_the_hub_begins_another_run(tmp_path: Path) -> None:
    """Llama 3 by torchtitan's adapter, which turns the rows of two matrices, from two ranks to one."""
    make_assets(tmp_path)
    override = ["--override.imports", f"{OVERRIDES}.elastic_checkpoint"]
    hub = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf", "--checkpoint.interval=50"]
    whole, _ = train(tmp_path, 2, "--checkpoint.folder=first", *hub, *override)
    (step,) = tmp_path.rglob("first/step-3")
    assert {file.suffix for file in step.iterdir()} <= {".safetensors", ".json"}
    loads = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={step}", "--training.steps=1"]
    begun, log = train(tmp_path, 1, "--checkpoint.folder=second", *loads, *override)
    stock, _ = train(tmp_path, 1, "--checkpoint.folder=third", *loads)
    assert list(whole) == [1, 2, 3] and begun == stock and "Loading from HF safetensors" in log


def children_of(pid: int) -> list[int]:
    """Also those that other threads than the first have started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize("loader", ["torchtitan's", "elastic_data"])
def test_a_trainer_that_gets_a_signal_saves_and_exits(tmp_path: Path, loader: str) -> None:
    """So do the workers of its data loader, which live on."""
    make_assets(tmp_path)
    options = '{"signals": ["SIGTERM"], "grace_seconds": 60, "exit_code": 75}'
    common = ["--checkpoint.interval=1000", "--dataloader.num_workers=1"]
    common += ["--override.imports", f"{OVERRIDES}.elastic_checkpoint={options}"]
    common += [f'{OVERRIDES}.elastic_data={{"num_shards": 2}}'] if loader == "elastic_data" else []
    command = command_of(2, "--training.steps=1000", "--lr_scheduler.total_steps=1000", "--checkpoint.async_mode=async")
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen([*command, *common], cwd=tmp_path, env=environment_of(tmp_path), stdout=log, stderr=log)
        colors = re.compile(r"\x1b\[[\d;]*m")
        eventually(lambda: job.poll() is not None or STEP.search(colors.sub("", (tmp_path / "log").read_text())))
        trainers = children_of(job.pid)  # not torchrun, which hides the exit codes of its workers
        readers = [reader for trainer in trainers for reader in children_of(trainer)]
        assert len(readers) >= 2
        for pid in (*readers, trainers[-1]):
            ask_to_end(pid)
        job.wait()
        told = (tmp_path / "log").read_text()
    (saved,) = [step.name for step in tmp_path.rglob("step-*") if step.is_dir()]
    stop = re.search(r"SIGTERM at rank \d: at step (\d+) all ranks save this step and stop", told)
    assert stop is not None and saved == f"step-{stop[1]}" and "exitcode  : 75" in told, told[-4000:]
    end = int(stop[1]) + 1
    resumed, log_of_resume = train(tmp_path, 2, f"--training.steps={end}", "--lr_scheduler.total_steps=1000", *common)
    assert list(resumed) == [end], log_of_resume[-4000:]
