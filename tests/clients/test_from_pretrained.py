"""What transformers' ``from_pretrained`` makes of weights that ranks have written beside a ``config.json``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

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
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
}


def model_of(name: str) -> Any:
    torch.manual_seed(29)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)


def save_sharded(rank: int, world_size: int, name: str, path: Path, max_file_bytes: int) -> None:
    model = model_of(name)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tte.save(model.state_dict(), path, format="safetensors", max_file_bytes=max_file_bytes)


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
