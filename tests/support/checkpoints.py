"""Checkpoints of one state in every format, and of damaged and hostile ones."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.checkpoint_files import sharing_save
from torchtitan_ext.storage.metadata.lazy_metadata import MEMORY_FORMATS
from torchtitan_ext.storage.metadata.metadata_file import storage_meta_fields

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


def of_single_rank(path: Path, state: dict[str, Any]) -> Path:
    """What version 0.2 saved with ``use_collectives=False``: the metadata and the index are those of one rank."""
    path.mkdir(parents=True)
    (path / "notes.txt").touch()  # so that files have the save's id in their names
    tte.save(dict(state), path, no_dist=True)
    (path / "notes.txt").unlink()
    for file in [*path.glob(".metadata"), *path.glob(".tte_index.*")]:
        file.rename(path / f"__0{file.name}")
    return path


def without_metadata(path: Path) -> Path:
    """As version 0.2 could save it: the index has what ``.metadata`` says, and that file is not there."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = None
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    notes, files = list(index.notes.items()), list(index.files.values())
    sealed = _core.encode_index(index.save_id, -1, _core.digest(b""), notes, files, has_sums=index.has_sums)
    (path / ".tte_index").write_bytes(with_tables(sealed, tables_of(metadata)))
    (path / ".metadata").unlink()
    return path


def with_tables(index: bytes, tables: bytes) -> bytes:
    """An index with one section more."""
    body = index[:-8] + struct.pack("<IIQ", 3, 1, len(tables)) + tables + bytes(-len(tables) % 8)
    body = body[:24] + struct.pack("<Q", len(body) + 8) + body[32:]
    return body + struct.pack("<Q", _core.digest(body))


def tables_of(metadata: Metadata) -> bytes:
    """What an index has in the place of ``.metadata`` (docs/format.md)."""
    names: dict[str, int] = {}
    sizes: dict[tuple[int, ...], int] = {}
    lists: dict[tuple[tuple[int, int], ...], int] = {}

    def number(table: dict[Any, int], value: Any) -> int:
        return table.setdefault(value, len(table))

    keys = b""
    for fqn, entry in metadata.state_dict_metadata.items():
        keys += struct.pack("<I", number(names, fqn))
        if not isinstance(entry, TensorStorageMetadata):
            keys += b"\0"
            continue
        own = entry.properties
        chunks = tuple((number(sizes, tuple(c.offsets)), number(sizes, tuple(c.sizes))) for c in entry.chunks)
        shape, dtype = number(sizes, tuple(entry.size)), number(names, str(own.dtype).removeprefix("torch."))
        layout = number(names, str(own.layout))
        form = next(one for one, memory_format in MEMORY_FORMATS.items() if memory_format is own.memory_format)
        flags = 1 + 2 * own.requires_grad + 4 * own.pin_memory
        keys += struct.pack("<BIIIBI", flags, shape, dtype, layout, form, number(lists, chunks))
    out = struct.pack("<Q", len(names)) + b"".join(map(_text, names))
    out += struct.pack("<Q", len(sizes)) + b"".join(struct.pack(f"<B{len(one)}q", len(one), *one) for one in sizes)
    out += struct.pack("<Q", len(lists))
    out += b"".join(struct.pack(f"<Q{2 * len(one)}I", len(one), *sum(one, ())) for one in lists)
    out += struct.pack("<Q", len(metadata.state_dict_metadata)) + keys
    assert metadata.storage_meta is not None
    return out + _plain((metadata.planner_data, storage_meta_fields(metadata.storage_meta), metadata.version))


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(content)) + content


def _plain(value: Any) -> bytes:
    if value is None:
        return b"\0"
    if isinstance(value, bool):
        return struct.pack("<BB", 1, value)
    if isinstance(value, int):
        return struct.pack("<Bq", 2, value)
    if isinstance(value, float):
        return struct.pack("<Bd", 3, value)
    if isinstance(value, str):
        return b"\4" + _text(value)
    members = [member for pair in value.items() for member in pair] if isinstance(value, dict) else list(value)
    kind = 6 if isinstance(value, tuple) else 7 if isinstance(value, list) else 8
    return struct.pack("<BBQ", kind, 0, len(members)) + b"".join(map(_plain, members))


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
