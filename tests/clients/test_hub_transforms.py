"""Ready transforms against transformers: its own conversion, and models that compute the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences
from safetensors.torch import load_file
from torch.nn.functional import linear

import torchtitan_ext as tte
from torchtitan_ext.transforms import Transform, ready

pytest.importorskip("transformers")
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

pytestmark = pytest.mark.nightly("clients")

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
Q_ROWS, KV_ROWS = 16, 8


def built(cls: Any, config: Any) -> Any:
    torch.manual_seed(29)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zero biases would prove nothing
            parameter.normal_(std=0.3)
    return model


def through(state: dict[str, torch.Tensor], path: Path, transform: Transform, found: dict[str, torch.Tensor]) -> Any:
    tte.save(state, path, no_dist=True)
    tte.load(found, path, transform=transform, no_dist=True)
    return found


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, -1) for name, value in state.items()}


def test_mixtral_is_stacked_as_transformers_stacks_it(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    model = built(MixtralForCausalLM, config)
    model.save_pretrained(tmp_path / "hub")
    hub, state = load_file(tmp_path / "hub" / "model.safetensors"), dict(model.state_dict())
    transform = ready("transformers_mixtral")
    assert differences(through(hub, tmp_path / "a", transform, blank(state)), state) == []
    assert differences(through(state, tmp_path / "b", transform.inverse(), blank(hub)), hub) == []


def test_gpt2_without_conv1d_computes_the_same(tmp_path: Path) -> None:
    model = built(GPT2LMHeadModel, GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path / "hub")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    transform = ready("transformers_gpt2", dim=16)
    layer = "transformer.h.1"
    found = {f"{layer}.attn.{name}_proj.weight": torch.zeros(16, 16) for name in "qkv"}
    found |= {f"{layer}.attn.{name}_proj.bias": torch.zeros(16) for name in "qkv"}
    found |= {f"{layer}.mlp.c_fc.weight": torch.zeros(64, 16), f"{layer}.mlp.c_proj.weight": torch.zeros(16, 64)}
    through(hub, tmp_path / "a", transform, found)
    block, inputs = model.transformer.h[1], torch.randn(5, 16)
    parts = [
        linear(inputs, found[f"{layer}.attn.{name}_proj.weight"], found[f"{layer}.attn.{name}_proj.bias"])
        for name in "qkv"
    ]
    torch.testing.assert_close(torch.cat(parts, 1), block.attn.c_attn(inputs))
    inner = linear(inputs, found[f"{layer}.mlp.c_fc.weight"], block.mlp.c_fc.bias)
    torch.testing.assert_close(inner, block.mlp.c_fc(inputs))
    back = through(hub, tmp_path / "b", transform.then(transform.inverse()), blank(hub))
    assert differences(back, hub) == []
