"""Safetensors that ranks write together, whatever their layouts, read by the safetensors library bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BY_NAME, EVEN, UNEVEN, build_model, build_whole
from reference import same_bits
from safetensors.torch import load_file

import torchtitan_ext as tte


def read_by_the_library(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory; its index, if there is one, names exactly these."""
    files = {name: load_file(path / name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")}
    index = path / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"] == {fqn: name for name, part in files.items() for fqn in part}
        assert content["metadata"]["total_size"] == sum(x.nbytes for part in files.values() for x in part.values())
    else:
        assert list(files) == ["model.safetensors"]
    return {fqn: tensor for part in files.values() for fqn, tensor in part.items()}


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for fqn, whole in truth.items():
        assert same_bits(found[fqn], whole.detach()), fqn


def save_model(rank: int, world_size: int, layout: str, sizes: Any, path: Path) -> None:
    model = build_model(BY_NAME[layout], sizes)
    tte.save(model.state_dict(), path, format="safetensors", max_file_bytes=3000)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("fsdp2", EVEN), ("fsdp2_tp2", UNEVEN), ("hsdp2x2_tp2", UNEVEN), ("fsdp4_tp2", UNEVEN), ("fsdp8", UNEVEN)],
    ids=str,
)
def test_models_of_any_mesh(run_world: Callable[..., Any], tmp_path: Path, layout: str, sizes: Any) -> None:
    run_world(BY_NAME[layout].world_size, save_model, layout, sizes, tmp_path / "hf")
    truth = build_whole(sizes).state_dict()
    assert_same(read_by_the_library(tmp_path / "hf"), truth)
    assert len(list((tmp_path / "hf").iterdir())) > 2
