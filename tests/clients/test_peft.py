"""peft's LoRA on sharded models: adapters alone saved by N ranks, loaded by M, over weights of another checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft import (
    LoraConfig,
    PeftModel,
    get_base_model_state_dict,
    get_peft_model,
    get_peft_model_state_dict,
    set_base_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.nightly("clients")

STEPS_BEFORE, STEPS_AFTER = 3, 3
BATCH_SIZE, SEQUENCE, VOCABULARY = 12, 9, 37
HOW = {"ours": tte.integrations.installed, "stock": nullcontext}
Answer = tuple[Any, list[float]]


def make_base(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))


class AdapterJob:
    """A sharded model with weights of one checkpoint under LoRA adapters, and AdamW over the adapters."""

    def __init__(self, base: Path) -> None:
        # 5 is uneven over 2, 3 and 4 ranks.
        lora = LoraConfig(r=5, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        self.model: PeftModel = get_peft_model(make_base(seed=1), lora)
        for layer in self.model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        weights = get_base_model_state_dict(self.model)
        dcp.load(weights, checkpoint_id=base)
        set_base_model_state_dict(self.model, weights)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)

    def adapters(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"adapter": get_peft_model_state_dict(self.model), "optimizer": optimizer}

    def load_adapters(self, path: Path) -> None:
        state = self.adapters()
        dcp.load(state, checkpoint_id=path)
        set_peft_model_state_dict(self.model, state["adapter"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def train(self, steps: range) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        batches = torch.randint(VOCABULARY, (STEPS_BEFORE + STEPS_AFTER, BATCH_SIZE, SEQUENCE), generator=generator)
        losses = []
        for step in steps:
            tokens = batches[step].chunk(dist.get_world_size())[dist.get_rank()]
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses

    def fingerprint(self) -> Any:
        state = self.adapters()
        base = get_base_model_state_dict(self.model)
        return tte.fingerprint({"base": base, "adapter": state["adapter"], "optimizer": state["optimizer"]["state"]})


def save_base(rank: int, world_size: int, path: Path) -> None:
    model = make_base(seed=0)
    fully_shard(model)
    for how, context in HOW.items():
        with context():
            dcp.save(get_model_state_dict(model), checkpoint_id=path / how)


def save_adapters(rank: int, world_size: int, base: Path, path: Path) -> Answer:
    job = AdapterJob(base / "stock")
    job.train(range(STEPS_BEFORE))
    for how, context in HOW.items():
        with context():
            dcp.save(job.adapters(), checkpoint_id=path / how)
    return job.fingerprint(), job.train(range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))


def load_adapters(rank: int, world_size: int, base: Path, path: Path) -> dict[tuple[str, str], Answer]:
    answers = {}
    for saved in HOW:
        for loaded, context in HOW.items():
            with context():
                job = AdapterJob(base / saved)
                job.load_adapters(path / saved)
            answers[saved, loaded] = job.fingerprint(), job.train(range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
    return answers


def test_adapters_of_4_ranks_to_3_and_2(run_world: Callable[..., Any], tmp_path: Path) -> None:
    base, path = tmp_path / "base", tmp_path / "adapters"
    run_world(2, save_base, base)
    saved = run_world(4, save_adapters, base, path)[0]
    for how in HOW:
        keys = dcp.FileSystemReader(path / how).read_metadata().state_dict_metadata
        assert keys and all("lora_" in key or key.startswith("optimizer.param_groups") for key in keys)
    for world_size in (3, 2):
        for answers in run_world(world_size, load_adapters, base, path):
            assert len(answers) == 4
            for fingerprint, losses in answers.values():
                assert fingerprint == saved[0]
                assert losses == pytest.approx(saved[1], abs=1e-5)
