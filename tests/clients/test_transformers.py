"""transformers' models on its own meshes and in its ``Trainer``: saved by N ranks, resumed by M, ours and stock."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import Dataset

import torchtitan_ext as tte

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from fsdp_on_cpu import fsdp_on_cpu, take_ranks_for_gpus
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

pytestmark = pytest.mark.nightly("clients")

STEPS_BEFORE, STEPS_AFTER = 3, 3
BATCH_SIZE, SEQUENCE = 12, 9
# Uneven over 3 ranks. There transformers' own meshes train a tied embedding otherwise, checkpoint or not.
VOCABULARY = 40
HOW = {"ours": tte.integrations.installed, "stock": nullcontext}

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, **NO_DROPOUT),
}
Answer = tuple[Any, list[float]]


def tokens() -> torch.Tensor:
    rows = (STEPS_BEFORE + STEPS_AFTER) * BATCH_SIZE
    return torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(0))


class MeshJob:
    """A model loaded onto a mesh by ``from_pretrained(distributed_config=...)``, and AdamW."""

    def __init__(self, path: Path, mesh: dict[str, int], rank: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**mesh))
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.dp, self.dp_rank = mesh["fsdp_size"], rank // mesh["tp_size"]

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = tokens()[step * BATCH_SIZE : (step + 1) * BATCH_SIZE].chunk(self.dp)[self.dp_rank]
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach()
            torch.distributed.all_reduce(total)
            losses.append(total.item() / torch.distributed.get_world_size())
        return losses

    def fingerprint(self) -> Any:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return tte.fingerprint({"model": model, "optimizer": optimizer["state"]})


def make_pretrained(rank: int, world_size: int, name: str, path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)


def save_pretrained(rank: int, world_size: int, path: Path, mesh: dict[str, int]) -> Answer:
    job = MeshJob(path / "pretrained", mesh, rank)
    job.train(range(STEPS_BEFORE))
    for how, context in HOW.items():
        with context():
            job.model.save_pretrained(path / how, distributed_checkpoint=True)
            save_optimizer_distributed(job.model, job.optimizer, str(path / how / "optimizer"))
    return job.fingerprint(), job.train(range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))


def load_pretrained(rank: int, world_size: int, path: Path, mesh: dict[str, int]) -> dict[tuple[str, str], Answer]:
    answers = {}
    for saved in HOW:
        for loaded, context in HOW.items():
            with context():
                job = MeshJob(path / saved, mesh, rank)
                load_optimizer_distributed(job.model, job.optimizer, str(path / saved / "optimizer"))
            after = range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
            answers[saved, loaded] = job.fingerprint(), job.train(after)
    return answers


def assert_goes_on(answer: Answer, saved: Answer) -> None:
    assert answer[0] == saved[0]
    assert answer[1] == pytest.approx(saved[1], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "tp", "meshes"),
    [
        ("llama", 2, [(3, 1), (1, 2)]),
        ("qwen2_tied", 2, [(2, 1), (1, 2)]),
        ("mixtral", 2, [(3, 1), (1, 2)]),
        ("gpt2", 1, [(2, 1)]),
    ],
)
def test_a_mesh_of_4_ranks_to(
    run_world: Callable[..., Any], tmp_path: Path, name: str, tp: int, meshes: list[tuple[int, int]]
) -> None:
    run_world(1, make_pretrained, name, tmp_path / "pretrained", process_group=False)
    saved = run_world(4, save_pretrained, tmp_path, {"fsdp_size": 4 // tp, "tp_size": tp})[0]
    for fsdp_size, tp_size in meshes:
        mesh = {"fsdp_size": fsdp_size, "tp_size": tp_size}
        for answers in run_world(fsdp_size * tp_size, load_pretrained, tmp_path, mesh):
            assert len(answers) == 4
            for answer in answers.values():
                assert_goes_on(answer, saved)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(tokens())

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens()[index], "labels": tokens()[index]}


def run_trainer(rank: int, world_size: int, path: Path, name: str, how: str, step: int | None) -> list[float]:
    """The losses of ``Trainer`` from a checkpoint's step, or from the start; it saves after ``STEPS_BEFORE`` steps."""
    with fsdp_on_cpu(), HOW[how]():
        arguments = TrainingArguments(
            output_dir=str(path),
            use_cpu=True,
            fsdp=True,
            fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
            per_device_train_batch_size=BATCH_SIZE // world_size,
            max_steps=STEPS_BEFORE + STEPS_AFTER,
            save_steps=STEPS_BEFORE,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        take_ranks_for_gpus()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        trainer = Trainer(model, arguments, train_dataset=Rows())
        trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{step}") if step else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
def test_trainer(run_world: Callable[..., Any], tmp_path: Path, name: str) -> None:
    whole = {how: run_world(4, run_trainer, tmp_path / how, name, how, None)[0] for how in HOW}
    assert whole["ours"] == whole["stock"] and len(whole["ours"]) == STEPS_BEFORE + STEPS_AFTER
    for how in HOW:
        indices = list((tmp_path / how / f"checkpoint-{STEPS_BEFORE}").glob("*/.tte_index"))
        assert len(indices) == (2 if how == "ours" else 0)
    for world_size, saved, loaded in [(2, "ours", "ours"), (3, "ours", "stock"), (2, "stock", "ours")]:
        losses = run_world(world_size, run_trainer, tmp_path / saved, name, loaded, STEPS_BEFORE)[0]
        assert losses == pytest.approx(whole["ours"], abs=1e-4)
