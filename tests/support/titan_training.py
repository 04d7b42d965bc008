"""Runs of torchtitan 0.3.0's own trainer on CPU, on texts and a tokenizer made for it."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import tokenizers

WORDS = [f"word{number}" for number in range(200)]
OVERRIDES = "torchtitan_ext.integrations.torchtitan"
ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
STEP = re.compile(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)")


def make_assets(folder: Path) -> None:
    """A tokenizer of whole words, and documents, where torchtitan's debug model looks for them."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    assets = folder / "tests" / "assets"
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 90))) for _ in range(80)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (assets / "c4_test" / "data.json").write_text(lines)


def command_of(num_ranks: int, *arguments: str, script: Path = ON_CPU) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    options = [
        *("--module", "llama3", "--config", "llama3_debugmodel", "--validator.no-enable"),
        *("--training.disable_cuda_graphs", "--parallelism.spmd_backend", "full_dtensor"),
        *("--training.seq_len", "32", "--training.local_batch_size", "2", "--training.global_batch_size", "4"),
        *("--training.mixed_precision_param", "float32", "--training.steps", "3", "--lr_scheduler.total_steps", "6"),
        *("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only"),
    ]
    return [*launch, str(script), *options, f"--parallelism.data_parallel_shard_degree={num_ranks}", *arguments]


def environment_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def train(
    folder: Path, num_ranks: int, *arguments: str, script: Path = ON_CPU
) -> tuple[dict[int, tuple[float, float]], str]:
    """Loss and gradient norm of each step, and the log."""
    done = subprocess.run(
        command_of(num_ranks, *arguments, script=script),
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=400,
    )
    log = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, log[-4000:]
    # In this set-up the trainer logs the sum of the ranks' losses.
    return {int(step): (float(loss) / num_ranks, float(norm)) for step, loss, norm in STEP.findall(log)}, log
