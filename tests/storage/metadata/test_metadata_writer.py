"""`.metadata` written from columns: what pickle would say of the same objects, to pickle and to our reader."""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from states import save
from test_metadata_file import assert_same
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext._core import RankFile
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.metadata.metadata_file import (
    columns_of,
    encode_metadata,
    parse_metadata,
    storage_meta_fields,
)

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=300)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16])
PROPERTIES = st.builds(
    TensorProperties,
    dtype=DTYPES,
    layout=st.sampled_from([torch.strided, torch.sparse_coo]),
    requires_grad=st.booleans(),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    pin_memory=st.booleans(),
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | NAMES | st.binary()
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)


def corners(num_dims: int) -> Any:
    """Offsets or sizes; of as many bytes as a tensor can have, in elements of 16."""
    numbers = st.integers(0, 2 ** (58 // max(1, num_dims)))
    return st.lists(numbers, min_size=num_dims, max_size=num_dims)


@st.composite
def tensors(draw: Any) -> TensorStorageMetadata:
    num_dims = draw(st.integers(0, 3))
    sizes = corners(num_dims).map(torch.Size)
    chunks = draw(st.lists(st.builds(ChunkStorageMetadata, sizes, sizes), max_size=4))
    return TensorStorageMetadata(draw(PROPERTIES), draw(sizes), chunks)


STORAGE_METAS = st.builds(
    StorageMeta, st.none() | NAMES | st.just(Path("/run/step-1")), st.none() | NAMES, st.none() | NAMES, st.just([])
)


@st.composite
def metadatas(draw: Any) -> Metadata:
    entries: dict[str, Any] = draw(st.dictionaries(NAMES, st.builds(BytesStorageMetadata) | tensors(), max_size=5))
    return Metadata(entries, draw(PLAIN), storage_meta=draw(STORAGE_METAS), version=CURRENT_DCP_VERSION)


@st.composite
def rank_files(draw: Any) -> tuple[list[RankFile], dict[MetadataIndex, _StorageInfo]]:
    """Files with random records, and what stock would say of them."""
    files, parts = [], {}
    for rank in range(draw(st.integers(0, 3))):
        records, end = [], 0
        for fqn in draw(st.lists(NAMES, max_size=4)):
            offsets = draw(st.none() | st.integers(0, 3).flatmap(corners).map(tuple))
            index, num_bytes = draw(st.none() | st.integers(0, 2**40)), draw(st.integers(0, 2**40))
            records.append((fqn, offsets, index, end, num_bytes))
            place = MetadataIndex(fqn, offsets, index)
            parts.pop(place, None)
            parts[place] = _StorageInfo(f"__{rank}_0.distcp", end, num_bytes)
            end += num_bytes
        files.append(RankFile(f"__{rank}_0.distcp", rank, end, end, 0, encoded_records(records)))
    return files, parts


def encoded_records(records: list[tuple[Any, ...]]) -> bytes:
    """As docs/format.md says."""
    number = 0
    out = (1).to_bytes(4, "little") + number.to_bytes(4, "little") + len(records).to_bytes(8, "little")
    for fqn, offsets, index, offset, num_bytes in records:
        name = fqn.encode()
        flags, dims = (2, len(offsets)) if offsets is not None else (0, 0)
        out += len(name).to_bytes(4, "little") + name + bytes([flags, dims]) + (0).to_bytes(2, "little")
        for value in (-1 if index is None else index, offset, num_bytes, 0, *(offsets or ()), *((0,) * dims)):
            out += value.to_bytes(8, "little", signed=True)
    return out


@settings(max_examples=150, deadline=None)
@given(metadatas(), rank_files())
def test_random_metadata(metadata: Metadata, written: tuple[list[RankFile], dict[MetadataIndex, _StorageInfo]]) -> None:
    files, parts = written
    expected = Metadata(**{**vars(metadata), "storage_data": parts})
    columns = columns_of(metadata.state_dict_metadata)
    assert columns is not None
    for file in files:
        columns.add_records(file)
    meta = metadata.storage_meta
    assert meta is not None
    content = columns.to_pickle(metadata.planner_data, storage_meta_fields(meta), CURRENT_DCP_VERSION)
    assert content is not None
    assert content[:2] == b"\x80\x04"  # every Python from 3.4 on reads protocol 4
    pickletools.dis(content, out=io.StringIO())
    assert_same_in_any_order(pickle.loads(content), expected)
    assert_same_in_any_order(parse_metadata(content), expected)
    assert encode_metadata(metadata, files) == content


def assert_same_in_any_order(parsed: Metadata, expected: Metadata) -> None:
    """A part that stands there twice keeps its first place here and has its last in the test's dict."""
    order = sorted(parsed.storage_data, key=repr)
    ordered = {place: parsed.storage_data[place] for place in order}
    indices = {place: place.index for place in parsed.storage_data}
    assert indices == {place: place.index for place in expected.storage_data}
    assert_same(
        Metadata(**{**vars(parsed), "storage_data": ordered}),
        Metadata(**{**vars(expected), "storage_data": {place: expected.storage_data[place] for place in order}}),
    )


def test_what_is_equal_is_written_once(tmp_path: Path) -> None:
    state = {f"layers.{layer}.weight": torch.ones(4, 3) for layer in range(50)}
    dcp.save(state, storage_writer=FileWriter(tmp_path, sync=False), no_dist=True)
    content = (tmp_path / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    entries = list(metadata.state_dict_metadata.values())
    assert all(entry.chunks is entries[0].chunks for entry in entries)
    assert all(entry.properties is entries[0].properties and entry.size is entries[0].size for entry in entries)
    assert content.count(b"layers.7.weight") == content.count(b"__0_0.distcp") == 1


class OwnEntry(TensorStorageMetadata):
    pass


class OwnMetadata(Metadata):
    pass


def with_own_entry(metadata: Metadata) -> Metadata:
    metadata.state_dict_metadata["w"] = OwnEntry(**vars(metadata.state_dict_metadata["w"]))
    return metadata


def with_extra_field(metadata: Metadata) -> Metadata:
    metadata.extra = 3  # type: ignore[attr-defined]
    return metadata


@pytest.mark.parametrize(
    "change",
    [
        with_own_entry,
        with_extra_field,
        lambda metadata: OwnMetadata(**vars(metadata)),
        lambda metadata: Metadata(**{**vars(metadata), "planner_data": {"w": {1, 2}}}),
        lambda metadata: Metadata(**{**vars(metadata), "planner_data": 2**70}),
        lambda metadata: Metadata(**{**vars(metadata), "planner_data": torch.float32}),
    ],
)
def test_what_others_add_is_pickled(change: Any) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([3]), [chunk])
    metadata = change(Metadata({"w": entry}, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION))
    file = RankFile("__0_0.distcp", 0, 9, 9, 0, encoded_records([("w", (0,), 0, 0, 9)]))
    loaded = pickle.loads(encode_metadata(metadata, [file]))
    assert type(loaded) is type(metadata) and vars(loaded) == vars(metadata)
    assert loaded.storage_data == {MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, 9)}


def test_a_planner_value_that_holds_itself_is_pickled() -> None:
    loop: list[Any] = []
    loop.append(loop)
    metadata = Metadata({}, {"loop": loop}, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    loaded = pickle.loads(encode_metadata(metadata, [])).planner_data["loop"]
    assert loaded[0] is loaded


def test_shared_values_stay_shared() -> None:
    value: Any = ("leaf",)
    for _ in range(60):
        value = [value, value]
    columns = _core.MetadataColumns()
    content = columns.to_pickle(value, {}, "1")
    assert content is not None and len(content) < 5000
    read = pickle.loads(content).planner_data
    for _ in range(60):
        assert read[0] is read[1]
        read = read[0]


@pytest.mark.parametrize("planner", [tte.SavePlanner, dcp.DefaultSavePlanner])
def test_the_file_that_a_save_writes(tmp_path: Path, planner: Any) -> None:
    save(
        {"w": torch.ones(3, 4), "step": 3, "nested": {"b": torch.ones(2)}}, FileWriter(tmp_path, sync=False), planner()
    )
    content = (tmp_path / ".metadata").read_bytes()
    loaded = pickle.loads(content)
    assert_same(parse_metadata(content), loaded)
    assert {info.relative_path for info in loaded.storage_data.values()} == {"__0_0.distcp"}
    assert loaded.storage_meta.checkpoint_id == tmp_path
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = FileReader(tmp_path).read_metadata()
    assert stock.state_dict_metadata == ours.state_dict_metadata and stock.planner_data == ours.planner_data
