"""Ours in the place of DCP's storage for Hugging Face: the final safetensors files, without shards in between."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import DTYPES, random_bits
from models import HandMade, differences, poison
from random_layouts import build, random_layouts
from safetensors.torch import load_file
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchtitan_ext as tte
from torchtitan_ext.integrations.install import Settings, _replace_in_load, _replace_in_save, _settings
from torchtitan_ext.storage.weights.safetensors_reader import SafetensorsReader
from torchtitan_ext.storage.weights.writer import SafetensorsWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def truth_of(seed: int) -> dict[str, torch.Tensor]:
    shapes = [(9, 4), (17, 3), (5,), (2, 3, 4), (33, 2)]
    return {f"w{number}": random_bits(shape, DTYPES[number], seed) for number, shape in enumerate(shapes)}


def described(layouts: dict[str, HandMade]) -> dict[str, HandMade]:
    """Those that need no argument of a planner."""
    return {name: layout for name, layout in layouts.items() if not layout.must_be_stated}


def writer_of(path: Path, **options: Any) -> HuggingFaceStorageWriter:
    return HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True, **options)


def save_and_load(rank: int, world_size: int, path: Path) -> list[str]:
    tte.install()
    lines = []
    try:
        for seed in range(3):
            truth = truth_of(seed)
            layouts = described(random_layouts(seed, world_size, truth))
            state, _ = build(truth, layouts)
            numbers = {name: 1 + index % 2 for index, name in enumerate(layouts)} if seed == 1 else None
            place = path / str(seed)
            dcp.save(state, storage_writer=writer_of(place, fqn_to_index_mapping=numbers))
            found = [load_file(file) for file in sorted(place.glob("*.safetensors"))]
            assert len(found) == (2 if seed == 1 else 1) and not (place / "sharded").exists()
            merged = {name: value for one in found for name, value in one.items()}
            lines += differences(merged, {name: truth[name] for name in layouts})
            poison(state)
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(place)))
            full = {name: tte.full_tensor(value) for name, value in state.items()}
            lines += differences(full, {name: truth[name] for name in layouts})
    finally:
        tte.integrations.uninstall()
    return lines


def test_any_layout_is_saved_and_loaded(run_world, tmp_path: Path) -> None:
    assert run_world(4, save_and_load, tmp_path) == [[]] * 4


def save_later(rank: int, world_size: int, path: Path, kind: AsyncCheckpointerType) -> list[str]:
    truth = truth_of(7)
    state, _ = build(truth, described(random_layouts(1, world_size, truth)))
    tte.install()
    try:
        dcp.async_save(state, storage_writer=writer_of(path), async_checkpointer_type=kind).result()
    finally:
        tte.integrations.uninstall()
    assert not (path / "sharded").exists()
    return differences(load_file(path / "model.safetensors"), {name: truth[name] for name in state})


IN_A_PROCESS = pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.sampled(0.5, "child processes"))


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, IN_A_PROCESS])
def test_asynchronous_saves_of_weights(run_world, tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    assert run_world(2, save_later, tmp_path / "hf", kind) == [[], []]


def replaced(settings: Settings, storage: Any) -> Any:
    if isinstance(storage, HuggingFaceStorageReader):
        passed = {"storage_reader": storage}
        _replace_in_load(settings, passed)
        return passed["storage_reader"]
    passed = {"storage_writer": storage}
    _replace_in_save(settings, passed)
    return passed["storage_writer"]


def test_what_takes_which_place(tmp_path: Path) -> None:
    everything = _settings("install", True, True, {"sync": False})
    writer = replaced(everything, writer_of(tmp_path, thread_count=3, fqn_to_index_mapping={"w": 2}))
    assert type(writer) is SafetensorsWriter and (writer.path, writer.thread_count) == (tmp_path, 3)
    assert (writer.file_numbers, writer.sync) == ({"w": 2}, False)
    assert type(replaced(everything, HuggingFaceStorageWriter(str(tmp_path)))) is SafetensorsWriter
    reader = replaced(everything, HuggingFaceStorageReader(str(tmp_path), thread_count=2))
    assert type(reader) is SafetensorsReader and (reader.path, reader.thread_count) == (tmp_path, 2)
    for planners, storage, left in (
        (True, True, HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)),  # shards, for somebody else
        (True, False, writer_of(tmp_path)),
        (False, True, writer_of(tmp_path)),
        (True, False, HuggingFaceStorageReader(str(tmp_path))),
        (True, True, QuantizedHuggingFaceStorageReader(str(tmp_path))),
    ):
        assert replaced(_settings("install", planners, storage, {}), left) is left
