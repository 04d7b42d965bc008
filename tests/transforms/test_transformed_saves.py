"""Saves through a transform: held in any layout, written under other names and shapes, read by the safetensors library.

Forty random compositions of steps in the suite, 300 with ``make soak``.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_whole
from random_layouts import build, random_layouts
from random_transforms import Composition
from reference import same_bits
from safetensors.torch import load_file
from tier import SOAK, of_at_most_four
from transformed_states import DIM, HEAD_DIM, HEADS, TRANSFORM, saved_state, wanted_state

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.errors import StateRefusedError, TransformError, WrongValueError
from torchtitan_ext.transforms import Rule, Transform, ready

WITHOUT_SCALES = [rule for rule in TRANSFORM.rules if not any("fp8" in name or name == "step" for name in rule.sources)]
# Values of fp8 go as they are.
SAVED_AS = Transform(
    [*WITHOUT_SCALES, *(Rule(f"layers.*.{name}", f"layers.*.{name}") for name in ("fp8", "fp8_scale"))],
    drop=["optimizer.**", "step"],
)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def written_state() -> dict[str, torch.Tensor]:
    """By torch, on whole tensors."""
    saved = saved_state()
    wanted = {f"model.{name}": tensor for name, tensor in wanted_state().items() if "dense" not in name}
    return wanted | {name: tensor for name, tensor in saved.items() if "fp8" in name}


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert same_bits(found[name], tensor.contiguous()), name


def save_layouts(rank: int, world_size: int, seeds: range, folder: Path) -> None:
    truth = saved_state()
    for seed in seeds:
        state, orders = build(truth, random_layouts(seed, world_size, truth))
        options: dict[str, Any] = {"max_file_bytes": 4000, "transform": SAVED_AS}
        planner = tte.SavePlanner(layouts=orders)
        if seed % 2:
            tte.weights.async_save({**state, "step": 3}, folder / str(seed), planner=planner, **options).result()
        else:
            tte.weights.save({**state, "step": 3}, folder / str(seed), planner=planner, **options)


@pytest.mark.parametrize("world_size", of_at_most_four([1, 2, 4, 8]))
def test_any_layout_is_saved(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    seeds = range(10 * world_size, 10 * world_size + 3)
    run_world(world_size, save_layouts, seeds, tmp_path)
    for seed in seeds:
        assert len(list((tmp_path / str(seed)).iterdir())) > 3
        assert_same(read_all(tmp_path / str(seed)), written_state())


def composition_of(seed: int) -> Composition:
    rng = random.Random(seed)
    composition = Composition(rng, pads=False)
    for _ in range(rng.randint(1, 6)):
        composition.step()
    return composition


def save_compositions(rank: int, world_size: int, seeds: list[int], folder: Path) -> None:
    for seed in seeds:
        composition = composition_of(seed)
        truth = {name: torch.from_numpy(array) for name, array in composition.sources.items()}
        meshless = {name: tensor for name, tensor in truth.items() if tensor.dim() == 0}
        sharded = {name: tensor for name, tensor in truth.items() if tensor.dim() > 0}
        state, orders = build(sharded, random_layouts(seed, world_size, sharded))
        tte.weights.save(
            {**state, **meshless},
            folder / str(seed),
            transform=composition.transform(),
            planner=tte.SavePlanner(layouts=orders),
        )


@pytest.mark.parametrize("world_size", of_at_most_four([1, 2, 4, 8]))
def test_random_compositions(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    seeds = [1000 * world_size + number for number in range(10 if SOAK == 1 else 75)]
    run_world(world_size, save_compositions, seeds, tmp_path, timeout_seconds=600)
    for seed in seeds:
        composition = composition_of(seed)
        found = read_all(tmp_path / str(seed))
        wanted = torch.from_numpy(composition.array.copy())
        assert same_bits(found[composition.name], wanted), seed
        for name, array in composition.sources.items():
            assert torch.equal(found[name], torch.from_numpy(array)), (seed, name)


def test_casts_go_through_small_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_ext.storage.weights.boxes._CAST_BYTES", 100)
    monkeypatch.setattr("torchtitan_ext.storage.weights.boxes._BATCH_BYTES", 1000)
    whole = random_whole((37, 53), torch.float32, 29)
    steps = [transforms.cast("bfloat16"), transforms.transpose(0, 1), transforms.cast("float16")]
    tte.weights.save({"w": whole}, tmp_path, transform=Transform([Rule("w", "v", steps)]), no_dist=True)
    assert_same(read_all(tmp_path), {"v": whole.bfloat16().half().T})


def test_there_and_back_are_the_same_files(tmp_path: Path) -> None:
    there = ready("torchtitan_llama3", num_heads=HEADS, num_kv_heads=2, dim=DIM)
    rows, kv_rows = HEADS * HEAD_DIM, 2 * HEAD_DIM
    shapes = {"self_attn.q_proj": (rows, DIM), "self_attn.k_proj": (kv_rows, DIM), "self_attn.v_proj": (kv_rows, DIM)}
    shapes |= {"self_attn.o_proj": (DIM, rows), "mlp.gate_proj": (30, DIM), "mlp.up_proj": (30, DIM)}
    shapes |= {"mlp.down_proj": (DIM, 30), "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,)}
    layers = {f"layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in shapes.items()}
    names = {"embed_tokens.weight": (41, DIM), "norm.weight": (DIM,), **layers}
    hub = {f"model.{name}": random_whole(shape, torch.bfloat16, len(name)) for name, shape in names.items()}
    hub["lm_head.weight"] = random_whole((41, DIM), torch.bfloat16, 1)
    tte.weights.save(hub, tmp_path / "hub", no_dist=True)
    tte.weights.save(hub, tmp_path / "titan", transform=there, no_dist=True)
    titan = read_all(tmp_path / "titan")
    assert titan.keys() & hub.keys() == {"lm_head.weight"}
    tte.weights.save(titan, tmp_path / "back", transform=there.inverse(), no_dist=True)
    hub_bytes, back_bytes = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hub", "back"))
    assert hub_bytes == back_bytes


def test_a_kept_planner_lets_go_of_what_is_dropped(tmp_path: Path) -> None:
    planner = tte.SavePlanner()
    for number in range(2):
        state = {"w": torch.full((3,), float(number)), "dropped": torch.zeros(2), "step": number}
        kept = Transform([Rule("w", "w")], drop=["dropped", "step"])
        tte.weights.save(state, tmp_path, transform=kept, planner=planner, no_dist=True)
        assert planner.state_dict == {}
        assert_same(read_all(tmp_path), {"w": state["w"]})


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Transform([Rule("layers.0.w", "w")]), "layers.1.w: no rule takes it; give it a rule, or name it in drop"),
        (
            Transform([Rule(["layers.0.w", "layers.1.w"], "w", [transforms.place([9, 4], [[0, 0], [4, 0]])])]),
            r"element \[4, 0\]",
        ),
        (
            Transform([Rule("layers.*.w", ["layers.*.a", "layers.*.b"], [transforms.split(0, sizes=[2, 4])])]),
            r"layers.1.a: step 1, split, .* got \[2, 4\], 6 in all, for dim 0 of shape \[5, 4\]",
        ),
        (Transform([Rule("**", "**", [transforms.cast("complex128")])]), "which safetensors files have no name for"),
        (Transform([Rule("layers.0.w", "__metadata__"), Rule("**", "**")]), "keep their notes under this name"),
    ],
)
def test_transforms_that_do_not_fit_are_refused(tmp_path: Path, transform: Transform, expected: str) -> None:
    state = {f"layers.{layer}.w": torch.zeros(5, 4) for layer in range(2)}
    with pytest.raises(StateRefusedError, match=expected):
        tte.weights.save(state, tmp_path / "hf", transform=transform, no_dist=True)
    assert list(tmp_path.iterdir()) == []


def test_scales_and_values_have_no_way_into_the_files(tmp_path: Path) -> None:
    with pytest.raises(StateRefusedError) as caught:
        tte.weights.save({**saved_state(), "step": 3}, tmp_path, transform=TRANSFORM, no_dist=True)
    text = str(caught.value)
    assert "model.layers.0.dense: is made by dequantize, which a save does not" in text
    assert "step: is no tensor" in text and not isinstance(caught.value, TransformError)


def test_a_transform_is_an_object(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="transform"):
        tte.weights.save({}, tmp_path, transform={"rules": []}, no_dist=True)  # type: ignore[arg-type]


def test_values_that_are_dropped_need_not_be_written(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "hook": lambda: None}
    tte.weights.save(state, tmp_path, transform=Transform([Rule("a", "b")], drop=["hook"]), no_dist=True)
    assert load_file(tmp_path / "model.safetensors")["b"].tolist() == [1.0, 1.0]


def test_others_go_as_they_are_and_layers_get_other_numbers(tmp_path: Path) -> None:
    state = {f"h.{layer}.{name}": torch.full((2, 3), layer + len(name) / 10) for layer in range(2) for name in "qkw"}
    state["norm"] = torch.ones(4)
    rules = [
        Rule(["h.*.q", "h.*.k"], "h.*{+10}.qk", [transforms.concat(0, parts=2)]),
        Rule("h.*.w", "h.*{+10}.w"),
        Rule("**", "**", others=True),
    ]
    transform = Transform.from_json(Transform(rules).to_json())
    assert transform == Transform(rules)
    tte.weights.save(state, tmp_path, transform=transform, no_dist=True)
    assert sorted(read_all(tmp_path)) == ["h.10.qk", "h.10.w", "h.11.qk", "h.11.w", "norm"]
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    tte.load(again, tmp_path, transform=transform.inverse(), no_dist=True)
    assert_same(again, state)
    for name in ("h.*{10}", "h.**{+1}", "h.*{+01}"):
        with pytest.raises(WrongValueError, match="braces behind a star that add nothing to a number"):
            Rule(name, "h.*")
