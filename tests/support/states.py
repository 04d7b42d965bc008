"""States for tests of storage: every kind of tensor, and how to compare two states bit for bit."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.choose_step import StepChoice, choose_step
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError, SaveJob
from torchtitan_ext.checkpoint.operation.saves import Call, save_later, save_now
from torchtitan_ext.storage.runs.retention import Keep

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, but of bools only 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def mixed_state() -> dict[str, Any]:
    """Every dtype, every kind of strides, plain values."""
    state: dict[str, Any] = {str(dtype): random_tensor((5, 7), dtype) for dtype in DTYPES}
    matrix = random_tensor((40, 30), torch.float32)
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "five_dims": random_tensor((2, 3, 4, 5, 6), torch.int16),
        "transposed": matrix.t(),
        "columns": matrix[:, 3:11],
        "every_third": matrix[1::3, ::2],
        "rows_of_larger": matrix[4:9],
        "expanded": torch.arange(4.0).expand(3, 4),
        "channels_last": random_tensor((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        "conjugated": random_tensor((6,), torch.complex64).conj(),
        "negated": random_tensor((6,), torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        "two_pages": random_tensor((600, 1001), torch.float32),
        "step": 3,
        "settings": {"lr": 0.1, "name": "adam"},
    }
    return state


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on a device, of the same strides, in as large a storage, with the same lazy bits."""
    if tensor.is_conj():
        return moved(tensor.conj(), device).conj()
    if tensor.is_neg():
        return torch._neg_view(moved(torch._neg_view(tensor), device))
    tensor = tensor.detach()
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def on_device(state: dict[str, Any], device: str, every: int = 1) -> dict[str, Any]:
    """The state with its tensors on a device, but for every so manieth."""
    return {
        key: moved(value, device)
        if isinstance(value, torch.Tensor) and (every == 1 or position % every)
        else on_device(value, device)
        if isinstance(value, dict)
        else value
        for position, (key, value) in enumerate(state.items())
    }


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else on_host(value)
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }


def bits(value: torch.Tensor) -> torch.Tensor:
    """Of a new tensor: one element counts as contiguous with any stride, which a view of bytes does not take."""
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1)).view(torch.uint8)


def blank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Targets of the same shapes, contiguous, with other values."""
    blanked: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            blanked[key] = torch.full(value.shape, 1, dtype=torch.uint8).to(value.dtype)
        elif isinstance(value, dict):
            blanked[key] = blank(value)
        else:
            blanked[key] = None
    return blanked


def differences(state: Mapping[str, Any], truth: Mapping[str, Any]) -> list[str]:
    different = []
    for key, value in truth.items():
        if isinstance(value, torch.Tensor):
            same = state[key].dtype == value.dtype and torch.equal(bits(state[key]), bits(value))
        elif isinstance(value, dict) and isinstance(state[key], dict):
            same = state[key].keys() == value.keys() and not differences(state[key], value)
        else:
            same = state[key] == value
        if not same:
            different.append(key)
    return different


def without_strides(properties: TensorProperties) -> TensorProperties:
    """As ours: stock of torch 2.15 notes the strides of one rank's tensor, by which nothing loads."""
    return replace(properties, strides=None) if hasattr(properties, "strides") else properties  # type: ignore[call-arg]


def save(state: dict[str, Any], writer: StorageWriter, planner: SavePlanner | None = None) -> None:
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def load(state: dict[str, Any], reader: StorageReader, planner: LoadPlanner | None = None) -> dict[str, Any]:
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def save_of_run(
    state: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    keep: int | None = None,
    is_async: bool = False,
    stager: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> Any:
    """A save with options of a manager, to any place: its result, or the future of a save in a thread."""
    handling = {one.name: options.pop(one.name) for one in fields(OnStorageError) if one.name in options}
    options["planner"] = options.get("planner") or tte.SavePlanner()
    job = SaveJob(path, keep=keep and Keep(keep), on_storage_error=OnStorageError(**handling), **options)
    call = Call("async_save" if is_async else "save", no_dist=no_dist)
    return save_later(state, job, call, stager) if is_async else save_now(state, job, call)


def step_of_run(run: str | os.PathLike[str], step: StepChoice, fallback: str | os.PathLike[str]) -> Path | str:
    """The place of a step that a manager with a fallback chooses."""
    with Phases("load", None, no_dist=True, path=run) as phases:
        return choose_step(run, step, phases, fallback=fallback)
