"""Metadata that promises what no file holds, and saves that say nothing of what they lost."""

import dataclasses
import pickle
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.planners.saved_chunks import storage_problems
from torchtitan_ext.errors import CheckpointFailedError, ReshardError


def edit(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / ".tte_index").unlink()  # by which FileReader would refuse it at once


def lose_entry(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("w", torch.Size([0]))]


def age(metadata: Metadata) -> None:
    metadata.version = "9.0.0"


def lead_outside(metadata: Metadata) -> None:
    index, entry = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = dataclasses.replace(entry, relative_path="../elsewhere/__0_0.distcp")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lose_entry, "w: 1 of its 1 part(s) are in no file of the checkpoint"),
        (age, "has format version 9.0.0, this torchtitan_ext reads up to"),
        (
            lead_outside,
            "../elsewhere/__0_0.distcp: is named as a file of the checkpoint and lies outside its directory",
        ),
    ],
)
def test_a_load_refuses_what_the_metadata_shows(tmp_path: Path, change: Callable[..., None], text: str) -> None:
    tte.save({"w": torch.ones(4), "step": 3}, tmp_path)
    edit(tmp_path, change)
    state = {"w": torch.zeros(4), "step": 0}
    with pytest.raises(ReshardError, match=re.escape(text)):
        tte.load(state, storage_reader=FileSystemReader(tmp_path))
    with pytest.raises(CheckpointException, match=re.escape(text)):
        dcp.load(state, checkpoint_id=tmp_path, planner=tte.LoadPlanner())
    assert state["step"] == 0 and not state["w"].any()


def test_only_keys_that_are_wanted_count(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(4), "step": 3}, tmp_path)
    edit(tmp_path, lose_entry)
    state = {"step": 0}
    tte.load(state, tmp_path)
    assert state["step"] == 3


def test_metadata_without_storage_entries_is_taken_at_its_word() -> None:
    assert storage_problems(Metadata({}), []) == []


class ForgetfulWriter(FileSystemWriter):
    """As stock's where a thread of its writer failed: the results of what it should have written are not there."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        written = super().write_data(plan, planner)
        results = [result for result in written.wait() if result.index.fqn != "b"]
        some: Future[list[Any]] = torch.futures.Future()
        some.set_result(results)
        return some


def test_a_save_that_loses_a_part_in_silence_fails(tmp_path: Path) -> None:
    state = {"a": torch.ones(4), "b": torch.ones(3)}
    with pytest.raises(CheckpointFailedError, match="1 of 2 items were not written, without an error: b"):
        tte.save(state, storage_writer=ForgetfulWriter(tmp_path))
    assert not (tmp_path / ".metadata").exists()


def test_a_key_in_several_safetensors_files_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("model-1", "model-2"):
        save_file({"w": torch.ones(4), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 16)
    state = {"w": torch.zeros(4)}
    with pytest.raises(
        ReshardError, match=r"w: stands in 2 files \(model-1.safetensors, model-2.safetensors\); leave it"
    ):
        tte.load(state, storage_reader=NarrowReader(tmp_path))
    tte.load({"model-1": torch.zeros(1)}, storage_reader=NarrowReader(tmp_path))


class NarrowReader(HuggingFaceStorageReader):
    """Leaves out what is no safetensors file inside, which the stock reader stumbles over."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        broken = self.path / "broken.safetensors"
        content = broken.read_bytes()
        broken.unlink()
        try:
            return super().read_metadata()
        finally:
            broken.write_bytes(content)
