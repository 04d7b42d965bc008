"""Kinds of checkpoints that commands meet: good, empty, torn, foreign and hostile ones, each made at a path."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from calls import make, patch_metadata
from checkpoints import of_single_rank
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_ext.checkpoint.tables.component import WORLD_KEY

STATE: dict[str, Any] = {
    "layers.0.wq": torch.arange(48, dtype=torch.float32).view(8, 6),
    "layers.0.norm": torch.ones(6, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "note": "not a tensor",
}

FORMATS = ["stock", "ours", "ours without .metadata", "safetensors directory", "safetensors", "torch"]

TERMINAL = "\x1b[2J\x1b]0;owned\x07\u202e"
"""What a terminal obeys: it clears the screen, renames the window, and turns letters round."""

Maker = Callable[[Path], object]


class Runs:
    """Unpickles as a call that leaves a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def good(kind: str) -> Maker:
    return lambda path: make(path, kind, STATE)


def cut(kind: str, name: str, share: float = 0.5) -> Maker:
    """With a file that ends early."""

    def maker(path: Path) -> None:
        file = make(path, kind, STATE) / name
        os.truncate(file, int(file.stat().st_size * share))

    return maker


def lost(kind: str, name: str) -> Maker:
    """Without one of its files."""
    return lambda path: (make(path, kind, STATE) / name).unlink()


def patched(change: Callable[[dcp.Metadata], object]) -> Maker:
    """Stock's, with metadata that says something else."""
    return lambda path: patch_metadata(make(path, "stock", STATE), change)


def entry(metadata: dcp.Metadata) -> Any:
    """The metadata of `layers.0.wq`, of which its one chunk is the whole."""
    return metadata.state_dict_metadata["layers.0.wq"]


def resize(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...] | None = None) -> Maker:
    """Another box, or another shape, for `layers.0.wq`."""

    def change(metadata: dcp.Metadata) -> None:
        old = MetadataIndex("layers.0.wq", entry(metadata).chunks[0].offsets)
        place = metadata.storage_data.pop(next(index for index in metadata.storage_data if index == old))
        entry(metadata).chunks[0].offsets, entry(metadata).chunks[0].sizes = torch.Size(offsets), torch.Size(sizes)
        entry(metadata).size = torch.Size(shape or entry(metadata).size)
        metadata.storage_data[MetadataIndex("layers.0.wq", torch.Size(offsets), 0)] = place

    return patched(change)


def move(**fields: Any) -> Maker:
    """Another place for the record of `layers.0.wq`."""

    def change(metadata: dcp.Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "layers.0.wq")
        for name, value in fields.items():
            setattr(metadata.storage_data[index], name, value)

    return patched(change)


def plan_data(**entries: Any) -> Maker:
    """Other places in the nested state dict, or another world."""
    return patched(lambda metadata: metadata.planner_data.update(entries))


def named(kind: str, name: str) -> Maker:
    """With a key of this name."""
    return lambda path: make(path, kind, {**STATE, name: torch.ones(3)})


def with_pickle(path: Path) -> None:
    make(path, "stock", STATE)
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))


def with_value(path: Path) -> None:
    """Whose metadata is good, and one value would run code."""
    dcp.save({**STATE, "note": Runs()}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def own_metadata(path: Path) -> None:
    of_single_rank(path, dict(STATE))


def other_files(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "notes.txt").write_text("mine")


def safetensors(header: bytes, data: bytes = bytes(4)) -> Maker:
    def maker(path: Path) -> None:
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)

    return maker


def index_names(name: str) -> Maker:
    """A directory of safetensors whose index names a file elsewhere."""

    def maker(path: Path) -> None:
        make(path, "safetensors directory", STATE)
        index = path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"] |= {"layers.0.wq": name}
        index.write_text(json.dumps(content))

    return maker


def chunk_file(path: Path, number: int, sizes: list[int], offsets: list[int]) -> None:
    """A file of DCP's writer for Hugging Face with one chunk of `w`."""
    count = 4 * torch.Size(sizes).numel()
    notes = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
    header = {"__metadata__": notes, "w": {"dtype": "F32", "shape": sizes, "data_offsets": [0, count]}}
    text = json.dumps(header).encode()
    (path / f"shard-{number}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(count))


def chunk_files(*boxes: tuple[list[int], list[int]]) -> Maker:
    """A directory of such files; sizes and offsets of each."""

    def maker(path: Path) -> None:
        path.mkdir()
        for number, (sizes, offsets) in enumerate(boxes):
            chunk_file(path, number, sizes, offsets)

    return maker


def saved(value: Any) -> Maker:
    """A file of `torch.save` with this in it."""
    return lambda path: torch.save(value, path)


def nested(depth: int) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(depth):
        state = {"a": state}
    return state


def deep_pickle(depth: int) -> bytes:
    """A pickle of so many lists in each other."""
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def archive_of(pickled: bytes) -> Maker:
    """A file like one of `torch.save`, with this pickle."""

    def maker(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")

    return maker


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(10_000_000))


def world(record: Any) -> Maker:
    return plan_data(**{WORLD_KEY: record})


def save_id(text: str) -> Maker:
    return patched(lambda metadata: setattr(metadata.storage_meta, "save_id", text))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)
