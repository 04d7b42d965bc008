"""Checkpoints of one state in every format, and of damaged and hostile ones."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import torchtitan_ext as tte
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.checkpoint_files import sharing_save

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of bools only 0 and 1; floats have NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def shared_steps(run: Path) -> list[Path]:
    """Steps 1 to 3 of a run, of version 0.2: each is the same checkpoint, and they share one of its files."""
    steps = [run / f"step-{step}" for step in (1, 2, 3)]
    for step in steps:
        shutil.copytree(Path(__file__).parents[1] / "storage/golden/version_1_shared", step)
        shared = shared_file(step)
        if step != steps[0]:
            shared.unlink()
            os.link(steps[0] / shared.name, shared)
    return steps


def shared_file(step: Path) -> Path:
    (name,) = filter(sharing_save, os.listdir(step))
    return step / name


def tensors() -> dict[str, torch.Tensor]:
    state = {f"model.{str(dtype).removeprefix('torch.')}": random_bits((9, 7), dtype) for dtype in DTYPES}
    return state | {
        "model.wide": random_bits((33, 130), torch.float32, seed=1),
        "model.cube": random_bits((3, 5, 7), torch.int16, seed=2),
        "model.scalar": torch.tensor(2.5),
        "model.empty": torch.empty(0, 3),
        "model.nan": torch.tensor([float("nan"), 1.0]),
    }


def training_state() -> dict[str, Any]:
    """Nested, with values that are no tensors."""
    model = {fqn.removeprefix("model."): tensor for fqn, tensor in tensors().items()}
    groups = [{"lr": 0.1, "params": ["wide"]}]
    return {"model": model, "optimizer": {"groups": groups, "step": {"wide": torch.tensor(3)}}, "step": 7}


def save_as(kind: str, path: Path, state: Mapping[str, Any]) -> Path:
    """A checkpoint of a state in one of the formats; nested states not as safetensors."""
    if kind == "ours":
        tte.save(dict(state), path)
    elif kind == "stock":
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    elif kind == "torch":
        torch.save(dict(state), path)
    elif kind == "safetensors":
        path.mkdir()
        half = len(state) // 2
        parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, path / name)
        weight_map = {fqn: name for name, part in zip(names, parts, strict=True) for fqn in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif kind == "safetensors file":
        path = path.with_suffix(".safetensors")
        save_file(dict(state), path)
    else:
        axes = dict(part.split("=") for part in kind.split(","))
        plain = path.with_name(f"{path.name}-plain")
        tte.save(dict(state), plain)
        reshard(open_source(plain), path, mesh={axis: int(size) for axis, size in axes.items()}, num_processes=1)
    return path


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0xFF]))


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE_DIR"],)
