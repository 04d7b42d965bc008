"""What transformers' ``from_pretrained`` makes of weights that ranks have written beside a ``config.json``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import same_bits
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

pytestmark = pytest.mark.nightly("clients")

SHAPE = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_tied": Qwen3Config(**SHAPE, head_dim=4, tie_word_embeddings=True),
    "gemma3_tied": Gemma3TextConfig(**SHAPE, head_dim=4),
    "gpt2_tied": GPT2Config(vocab_size=41, n_embd=16, n_layer=2, n_head=4, n_positions=16),
}


def model_of(name: str) -> Any:
    torch.manual_seed(29)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)


def sharded(model: Any, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    (layers,) = (part for part in model.base_model.children() if isinstance(part, torch.nn.ModuleList) and len(part))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_sharded(rank: int, world_size: int, name: str, path: Path, max_file_bytes: int) -> None:
    model = sharded(model_of(name), world_size)
    tte.weights.save(model.state_dict(), path, max_file_bytes=max_file_bytes)


def load_sharded(rank: int, world_size: int, name: str, path: Path) -> list[str]:
    model = sharded(model_of(name), world_size)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tte.load(model.state_dict(), path)
    truth = model_of(name).state_dict()
    return [fqn for fqn, value in model.state_dict().items() if not same_bits(tte.full_tensor(value), truth[fqn])]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_save_pretrained_wrote_is_loaded(run_world: Callable[..., Any], tmp_path: Path, name: str) -> None:
    model_of(name).save_pretrained(tmp_path)
    assert run_world(2, load_sharded, name, tmp_path) == [[]] * 2


@pytest.mark.parametrize("max_file_bytes", [4000, 10**9])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_reads_what_ranks_wrote(
    run_world: Callable[..., Any], tmp_path: Path, name: str, max_file_bytes: int
) -> None:
    whole = model_of(name)
    whole.save_pretrained(tmp_path)  # with other weights, which are replaced, and files that stay
    for parameter in whole.parameters():
        torch.nn.init.zeros_(parameter)
    whole.save_pretrained(tmp_path)
    run_world(3, save_sharded, name, tmp_path, max_file_bytes)
    assert (tmp_path / "config.json").exists() and (tmp_path / "generation_config.json").exists()
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    truth = model_of(name).state_dict()
    assert found.keys() == truth.keys() and all(same_bits(found[fqn], truth[fqn]) for fqn in truth)
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert any("lm_head.weight" in file for file in files) != name.endswith("tied")
