"""Ready transforms against transformers: its own conversion, and models that compute the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block_scales import quantized
from models import differences
from safetensors.torch import load_file
from torch.nn.functional import linear

import torchtitan_ext as tte
from torchtitan_ext.transforms import Transform, ready

pytest.importorskip("transformers")
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


def test_llama_with_fused_projections_is_what_phi_3_computes(tmp_path: Path) -> None:
    model = built(LlamaForCausalLM, LlamaConfig(**SHAPE))
    fused = built(Phi3ForCausalLM, Phi3Config(**SHAPE, rms_norm_eps=model.config.rms_norm_eps))
    transform = ready("vllm_llama", q_rows=Q_ROWS, kv_rows=KV_ROWS)
    state = dict(model.state_dict())
    through(state, tmp_path / "a", transform, dict(fused.state_dict()))
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(fused(tokens).logits, model(tokens).logits)
    back = through(dict(fused.state_dict()), tmp_path / "b", transform.inverse(), blank(state))
    assert differences(back, state) == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_with_fused_projections_has_the_same_projections(tmp_path: Path, kind: str) -> None:
    is_qwen2 = kind == "qwen2"
    config = Qwen2Config(**SHAPE) if is_qwen2 else Qwen3Config(**SHAPE, head_dim=4)
    model = built(Qwen2ForCausalLM if is_qwen2 else Qwen3ForCausalLM, config)
    state = dict(model.state_dict())
    transform = ready("vllm_llama", q_rows=Q_ROWS, kv_rows=KV_ROWS, bias=is_qwen2, heads_normed=not is_qwen2)
    layer = "model.layers.1"
    rows = Q_ROWS + 2 * KV_ROWS
    fused = {f"{layer}.self_attn.qkv_proj.weight": torch.zeros(rows, 16)}
    fused |= {f"{layer}.mlp.gate_up_proj.weight": torch.zeros(48, 16)}
    fused |= {f"{layer}.self_attn.qkv_proj.bias": torch.zeros(rows)} if is_qwen2 else {}
    through(state, tmp_path / "a", transform, fused)
    attention, inputs = model.model.layers[1].self_attn, torch.randn(5, 16)
    wanted = torch.cat([getattr(attention, f"{name}_proj")(inputs) for name in "qkv"], 1)
    bias = fused.get(f"{layer}.self_attn.qkv_proj.bias")
    torch.testing.assert_close(linear(inputs, fused[f"{layer}.self_attn.qkv_proj.weight"], bias), wanted)
    whole = {name: value for name, value in state.items() if "lm_head" not in name}
    everything = {**whole, "lm_head.weight": state["lm_head.weight"]}
    (tmp_path / "b").mkdir()
    there_and_back = transform.then(transform.inverse())
    assert differences(through(everything, tmp_path / "c", there_and_back, blank(everything)), everything) == []


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


MOE: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SHAPE, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        ),
        {"q_rows": Q_ROWS, "kv_rows": KV_ROWS},
    ),
    "deepseek": (
        DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **(SHAPE | {"num_key_value_heads": 4}), moe_intermediate_size=8, n_routed_experts=4, n_group=1,
                topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8,
                qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
            )
        ),
        {"q_a_rows": 12, "kv_a_rows": 12},
    ),
}  # fmt: skip


@pytest.mark.parametrize("quantized_as", ["", "deepseek", "transformers"])
@pytest.mark.parametrize("kind", MOE)
def test_experts_and_projections_have_the_names_of_vllm(tmp_path: Path, kind: str, quantized_as: str) -> None:
    """From the hub's files and from the model itself, whose experts are stacked; as they are, and in blocks of fp8."""
    model, sizes = MOE[kind]
    model.save_pretrained(tmp_path / "hub")
    hub, state = load_file(tmp_path / "hub" / "model.safetensors"), dict(model.state_dict())
    layer = "model.layers.1"
    gate_up, down = (state[f"{layer}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    of_attention = "qkv_proj" if kind == "qwen3" else "fused_qkv_a_proj"
    parts = [f"{name}_proj" for name in "qkv"] if kind == "qwen3" else ["q_a_proj", "kv_a_proj_with_mqa"]
    plain = {
        f"{layer}.mlp.experts.w13_weight": gate_up,
        f"{layer}.mlp.experts.w2_weight": down,
        f"{layer}.self_attn.{of_attention}.weight": torch.cat(
            [state[f"{layer}.self_attn.{name}.weight"] for name in parts]
        ),
    }
    wanted = dict(plain)
    if quantized_as:
        sizes = {**sizes, "quantized": True, "block": [8, 4], "scaling": quantized_as}
        for name, weight in plain.items():
            block = (*(1 for _ in weight.shape[2:]), 8, 4)
            values, scales = quantized(weight.detach().bfloat16(), block, torch.float8_e4m3fn, quantized_as)
            wanted |= {name: values, f"{name}_scale_inv": scales}
    model_name = f"vllm_{'qwen3_moe' if kind == 'qwen3' else 'deepseek_v3'}"
    for source, stacked in ((hub, False), (state, True)):
        transform = ready(model_name, **sizes, stacked=stacked)
        by_files = through(source, tmp_path / f"{stacked}", transform, blank(wanted))
        in_memory = blank(wanted)
        tte.reshard(source, in_memory, transform=transform)
        assert differences(by_files, wanted) == [] and differences(in_memory, wanted) == []
        if not quantized_as:
            there_and_back = transform.then(transform.inverse())
            assert differences(through(source, tmp_path / f"{stacked}2", there_and_back, blank(source)), source) == []


def test_gpt_oss_computes_the_same_under_vllms_names(tmp_path: Path) -> None:
    config = GptOssConfig(**SHAPE, head_dim=4, num_local_experts=4, num_experts_per_tok=2)
    model = built(GptOssForCausalLM, config)
    state = dict(model.state_dict())
    transform = ready("vllm_gpt_oss", q_rows=Q_ROWS, kv_rows=KV_ROWS)
    layer, inputs = "model.layers.1", torch.randn(5, 16)
    found = {f"{layer}.attn.qkv.weight": torch.zeros(32, 16), f"{layer}.attn.qkv.bias": torch.zeros(32)}
    found |= {
        f"{layer}.mlp.experts.w13_weight": torch.zeros(4, 48, 16),
        f"{layer}.mlp.experts.w13_bias": torch.zeros(4, 48),
    }
    found |= {f"{layer}.mlp.experts.w2_weight": torch.zeros(4, 16, 24)}
    through(state, tmp_path / "a", transform, found)
    attention, experts = model.model.layers[1].self_attn, model.model.layers[1].mlp.experts
    wanted = torch.cat([getattr(attention, f"{name}_proj")(inputs) for name in "qkv"], 1)
    torch.testing.assert_close(
        linear(inputs, found[f"{layer}.attn.qkv.weight"], found[f"{layer}.attn.qkv.bias"]), wanted
    )
    for number in range(4):
        weight, bias = (found[f"{layer}.mlp.experts.w13_{kind}"][number] for kind in ("weight", "bias"))
        wanted = inputs @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        torch.testing.assert_close(linear(inputs, weight, bias), wanted)
        wanted = torch.ones(2, 24) @ experts.down_proj[number]
        torch.testing.assert_close(linear(torch.ones(2, 24), found[f"{layer}.mlp.experts.w2_weight"][number]), wanted)
    back = through(state, tmp_path / "b", transform.then(transform.inverse()), blank(state))
    assert differences(back, state) == []
