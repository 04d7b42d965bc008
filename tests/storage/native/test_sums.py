"""The sums that a save takes of its records: those of the chunks in the global tensors, for their own keys alone."""

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_states import random_state
from states import blank, differences, load, mixed_state, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.tables.tensor_sums import hex_of_digest
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.checkpoint_files import index_path
from torchtitan_ext.storage.native import file_writer
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES

KIND_PAIRS = list(itertools.permutations(["plain", "sums", "in place", "stock"], 2))


def index_of(path: Path) -> _core.Index:
    found = [name for name in os.listdir(path) if name.startswith(".tte_index")]
    return _core.parse_index((path / found[0]).read_bytes(), "index")


def chunk_sum(chunk: torch.Tensor, offsets: tuple[int, ...], global_sizes: tuple[int, ...]) -> int:
    sizes = tuple(chunk.shape)
    shard = LocalShard(sizes, (Chunk(offsets, sizes, (0,) * len(sizes)),) if chunk.numel() else ())
    return int(ops.fingerprint_shard(chunk, shard, global_sizes)) % 2**64


def check_sums(path: Path) -> int:
    """Compares the sum of each record with that of the chunk as stock reads it; returns how many there are."""
    index, metadata = index_of(path), FileReader(path).read_metadata()
    assert index.has_sums
    num_tensors = 0
    for file in index.files.values():
        content = (path / file.name).read_bytes()
        for record in _core.parse_records(file):
            assert (record.sum is None) == (record.dtype == "")
            if record.sum is None:
                continue
            dtype = getattr(torch, record.dtype)
            num_bytes = torch.Size(record.sizes).numel() * dtype.itemsize
            data = bytearray(content[record.data_offset : record.data_offset + num_bytes])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            sizes = metadata.state_dict_metadata[record.fqn].size
            assert record.sum == chunk_sum(flat.view(record.sizes), record.offsets or (), sizes), record.fqn
            assert index.sum_of(file.name, record.offset, record.fqn) == record.sum
            assert index.sum_of(file.name, record.offset, "another key") != record.sum
            num_tensors += 1
    return num_tensors


@pytest.mark.parametrize("seed", range(20))
def test_random_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", random.Random(seed).choice([64, 4096, 1 << 20]))
    save(random_state(seed), FileWriter(tmp_path, fingerprints=True), tte.SavePlanner())
    check_sums(tmp_path)


@pytest.mark.parametrize("block_bytes", [64, 512, 1 << 20])
def test_large_tensors_of_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", block_bytes)
    wide = torch.rand(60, 70)
    state = {
        "transposed": wide.t(),
        "window": wide[3:50, 5:60],
        "steps": wide[::3, ::7],
        "double_complex": torch.complex(wide.double(), wide.double())[:, 1:40],
        "conjugated": torch.complex(wide, wide).conj(),
        "expanded": wide[:1].expand(9, 70),
        "bools": wide > 0.5,
        "halves": wide.bfloat16()[1:],
        "eighths": wide.to(torch.float8_e4m3fn)[:, ::2],
        "number": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "permuted": torch.rand(4, 5, 6, 7).permute(2, 0, 3, 1),
    }
    save(state, FileWriter(tmp_path, fingerprints=True, thread_count=3))
    assert check_sums(tmp_path) == len(state)
    totals = {
        record.fqn: record.sum for file in index_of(tmp_path).files.values() for record in _core.parse_records(file)
    }
    digests = {key: hex_of_digest(totals[key] or 0, str(value.dtype), value.shape) for key, value in state.items()}
    assert digests == tte.fingerprint(state).values


def test_bytes_that_come_in_parts(tmp_path: Path) -> None:
    """As tensors of an accelerator do, in buckets, some of which are written before the tensor ends."""
    whole = torch.arange(40 * 50, dtype=torch.int32).view(40, 50)
    chunk = whole[3:30, 7:44].contiguous()
    for step in (1, 37, 100, 999):
        records = _core.RecordWriter(os.fsencode(tmp_path / "file"), 64, 2, False)
        records.add_record(("value", None, None), "", (), chunk.data_ptr(), 33)
        for key in ("a", "b"):
            records.begin_tensor((key, (3, 7), 0), "int32", chunk.shape, ELEMENT_TYPES[torch.int32], whole.shape)
            for part in chunk.flatten().split(step):
                records.add_bytes(part.data_ptr(), part.nbytes)
                records.write_queued()
            records.end_tensor()
        found = _core.parse_records(records.finish("file", bytes(16), 0))
        assert [record.sum for record in found] == [None, *[chunk_sum(chunk, (3, 7), tuple(whole.shape))] * 2]


def test_a_chunk_outside_of_its_tensor_has_none(tmp_path: Path) -> None:
    """As a planner of others may give them; the save is none of the worse for it."""
    tensor = torch.rand(4, 5)
    records = _core.RecordWriter(os.fsencode(tmp_path / "file"), 1 << 20, 1, False)
    element_type = ELEMENT_TYPES[tensor.dtype]
    for offsets, global_sizes in [((0, 0), (4, 4)), ((1, 0), (4, 5)), ((0, 0), (4, 5)), ((0, 0), (20,))]:
        key = ("w", offsets, None)
        records.add_tensor(
            key, NAMES[tensor.dtype], tensor.shape, element_type, tensor.data_ptr(), tensor.stride(), global_sizes
        )
    file = records.finish("file", bytes(16), 0)
    assert [record.sum is None for record in _core.parse_records(file)] == [True, True, False, True]
    encoded = _core.encode_index(
        bytes(16), 1, 0, [], [file, _core.RankFile("other", 1, 0, 0, 0, b"\0" * 12)], has_sums=True
    )
    parsed = _core.parse_index(encoded, "index").files
    assert (parsed["file"].sums, parsed["other"].sums) == (file.sums, b"")


def test_a_save_without_fingerprints_has_none(tmp_path: Path) -> None:
    save(mixed_state(), FileWriter(tmp_path))
    index = index_of(tmp_path)
    assert not index.has_sums and index.files["__0_0.distcp"].sums == b""
    assert index.sum_of("__0_0.distcp", 0, "w") is None and index.sum_of("no such file", 0, "w") is None


def test_damaged_sums_are_refused(tmp_path: Path) -> None:
    save({"w": torch.rand(4), "v": torch.rand(3)}, FileWriter(tmp_path, fingerprints=True))
    (file,) = index_of(tmp_path).files.values()
    for sums in (file.sums[:-1], file.sums + b"\0", b"\3" + file.sums[1:], b"\1" + file.sums[1:], b"\xff" * 8):
        other = _core.RankFile(file.name, 0, file.num_bytes, file.footer_offset, 0, file.records, sums)
        with pytest.raises(_core.FormatError):
            _core.parse_index(_core.encode_index(bytes(16), 1, 0, [], [other], has_sums=True), "index")


def test_files_have_the_save_id_in_their_names(tmp_path: Path) -> None:
    state = mixed_state()
    for _ in range(2):  # the second replaces the first
        writer = FileWriter(tmp_path / "step-1", fingerprints=True)
        save(state, writer)
        names = sorted(os.listdir(tmp_path / "step-1"))
        assert names == [".metadata", ".tte_index", f"__0_{writer.save_id}.distcp"]
        assert check_sums(tmp_path / "step-1") > 0
        assert differences(load(blank(state), FileReader(tmp_path / "step-1", "all")), state) == []
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("pair", KIND_PAIRS, ids="-".join)
def test_saves_of_all_kinds_replace_each_other(tmp_path: Path, pair: tuple[str, str]) -> None:
    path = tmp_path / "step-1"
    for kind in pair:
        state = {"w": torch.rand(50, 3), "n": torch.rand(2)}
        path.mkdir(exist_ok=True)
        (path / "notes.txt").unlink(missing_ok=True)
        if kind == "in place":
            (path / "notes.txt").write_text("a foreign file, so that nothing is renamed")
        if kind == "stock":
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        else:
            save(state, FileWriter(path, fingerprints=kind != "plain"))
            assert index_path(path, None).exists() == (kind != "in place")
        loaded = blank(state)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        assert differences(loaded, state) == []
    assert len(list(path.glob("*.distcp"))) == 1 + (kind == "stock" and pair[0] != "plain")


def save_shards(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(1)]),
        "tiny": distribute_tensor(torch.arange(1.0), mesh, [Shard(0)]),
        "plain": torch.arange(5),
        "value": 3,
    }
    tte.save(state, storage_writer=FileWriter(path, fingerprints=True))
    tte.save(state, f"{path}-again", fingerprints=True)
    tte.async_save(state, f"{path}-later", fingerprints=True).result()


def test_shards_of_two_ranks(tmp_path: Path, run_world: Callable[..., Any]) -> None:
    run_world(2, save_shards, str(tmp_path / "one"))
    for name in ("one", "one-again", "one-later"):
        assert check_sums(tmp_path / name) == 6
    again = tte.fingerprint({"rows": torch.arange(35.0).view(7, 5)})
    index = index_of(tmp_path / "one")
    total = sum(
        record.sum or 0 for file in index.files.values() for record in _core.parse_records(file) if record.fqn == "rows"
    )
    assert hex_of_digest(total, "torch.float32", (7, 5)) == again.values["rows"]
