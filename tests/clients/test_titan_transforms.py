"""Ready transforms against torchtitan's own conversion from and to Hugging Face's names and shapes."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences

import torchtitan_ext as tte
from torchtitan_ext.transforms import Transform, ready

pytestmark = pytest.mark.nightly("clients")

pytest.importorskip("torchtitan")

LLAMA3 = ready("torchtitan_llama3", num_heads=16, dim=256)
CASES: dict[str, tuple[str, str, Transform]] = {
    "llama3": ("llama3", "debugmodel", LLAMA3),
    "llama3, fewer heads of keys": (
        "llama3",
        "8B",
        ready("torchtitan_llama3", num_heads=32, num_kv_heads=8, dim=4096),
    ),
    "qwen3": ("qwen3", "debugmodel", ready("torchtitan_qwen3", tied=True)),
    "qwen3 with experts": ("qwen3", "debugmodel_moe", ready("torchtitan_qwen3")),
    "deepseek_v3": ("deepseek_v3", "debugmodel", ready("torchtitan_deepseek_v3")),
}
NUM_LAYERS = 2


def adapter_and_state(library: str, flavor: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """torchtitan's adapter of a model, and random tensors for the names of its first layers."""
    spec = import_module(f"torchtitan.models.{library}").model_registry(flavor)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in spec.model.build().state_dict().items()}
    generator = torch.Generator().manual_seed(29)
    state = {}
    for name, shape in shapes.items():
        if name.startswith("layers.") and int(name.split(".")[1]) >= NUM_LAYERS:
            continue
        # Only the rows of attention, and the number of experts, matter to the adapters.
        sizes = shape if "attention.qkv_linear" in name and library == "llama3" else [min(size, 64) for size in shape]
        state[name] = torch.randn(sizes, generator=generator, dtype=torch.bfloat16)
    return spec.state_dict_adapter(spec.model, None), state


def through(
    state: Mapping[str, torch.Tensor], path: Path, transform: Transform, like: Mapping[str, torch.Tensor]
) -> Any:
    """What a load of a state through a transform gives."""
    tte.save(dict(state), path, no_dist=True)
    found = {name: torch.full_like(value, -1) for name, value in like.items()}
    tte.load(found, path, transform=transform, no_dist=True)
    return found


@pytest.mark.parametrize("case", CASES)
def test_weights_come_and_go_as_torchtitan_converts_them(tmp_path: Path, case: str) -> None:
    library, flavor, transform = CASES[case]
    adapter, state = adapter_and_state(library, flavor)
    hub = {name: value.clone() for name, value in adapter.to_hf(dict(state)).items()}
    wanted = adapter.from_hf(dict(hub))
    assert wanted.keys() >= {name for name in state if "expert_bias" not in name}
    assert differences(through(hub, tmp_path / "hub", transform, wanted), wanted) == []
    if "tied" not in case and library != "qwen3":
        kept = {name: value for name, value in wanted.items() if name in state}
        assert differences(through(kept, tmp_path / "titan", transform.inverse(), hub), hub) == []
    if case == "qwen3 with experts":
        assert differences(through(wanted, tmp_path / "titan", transform.inverse(), hub), hub) == []


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.float() * whole


def test_layers_of_multi_token_prediction_come_behind_the_others(tmp_path: Path) -> None:
    """The hub counts them with the others, and has copies of the embedding and of the head in them."""
    spec = import_module("torchtitan.models.deepseek_v3").model_registry("debugmodel", num_mtp_layers=2)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in spec.model.build().state_dict().items()}
    generator = torch.Generator().manual_seed(29)
    state = {
        name: torch.randn([min(size, 64) for size in shape], generator=generator).bfloat16()
        for name, shape in shapes.items()
    }
    num_layers = len(spec.model.layers)
    adapter = spec.state_dict_adapter(spec.model, None)
    hub = {name: value.clone() for name, value in adapter.to_hf(dict(state)).items()}
    wanted = adapter.from_hf(dict(hub))
    assert (
        any(name.startswith("mtp_layers.1.moe.") for name in wanted)
        and f"model.layers.{num_layers + 1}.enorm.weight" in hub
    )
    transform = ready("torchtitan_deepseek_v3", mtp_layers=[num_layers, num_layers + 1])
    assert differences(through(wanted, tmp_path / "titan", transform.inverse(), hub), hub) == []
    hub |= {f"model.layers.{num_layers}.{name}.weight": torch.ones(3) for name in ("embed_tokens", "shared_head.head")}
    assert differences(through(hub, tmp_path / "hub", transform, wanted), wanted) == []


def test_fp8_weights_of_deepseek_are_scaled_on_the_way(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(29)
    hub, plain = {}, {}
    names = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(3)]
    for name in [*names, "model.layers.1.self_attn.o_proj.weight"]:
        weight = torch.randn(200, 150, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(2, 2, generator=generator)
        hub |= {name: weight, f"{name}_scale_inv": scale}
        plain[name] = dequantized(weight, scale)
    wanted = {
        "layers.1.moe.routed_experts.inner_experts.w3_EFD": torch.stack([plain[name] for name in names]),
        "layers.1.attention.wo.weight": plain["model.layers.1.self_attn.o_proj.weight"],
    }
    transform = ready("torchtitan_deepseek_v3", dtype="float32")
    assert differences(through(hub, tmp_path, transform, wanted), wanted) == []


def test_a_layer_that_torchtitan_would_drop_is_refused(tmp_path: Path) -> None:
    adapter, state = adapter_and_state("llama3", "debugmodel")
    hub = adapter.to_hf(dict(state))
    tte.save({**hub, "model.layers.0.self_attn.q_proj.bias": torch.zeros(256)}, tmp_path, no_dist=True)
    with pytest.raises(tte.errors.TransformError, match=r"q_proj\.bias: no rule takes it"):
        tte.load(dict(state), tmp_path, transform=LLAMA3, no_dist=True)
