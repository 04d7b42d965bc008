"""torchtitan 0.3.0's own trainer, on CPU: saved by two ranks, resumed by one."""

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("datasets")
pytest.importorskip("triton")
pytest.importorskip("tokenizers")

from titan_training import OVERRIDES, make_assets, train


@pytest.mark.slow
@pytest.mark.timeout(900)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
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
