"""Lazy mappings of metadata: dicts to everybody, with objects only for what was asked for."""

import copy
import dataclasses
import gc
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, load, mixed_state, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import torchtitan_ext as tte
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict
from torchtitan_ext.storage.metadata.metadata_file import parse_metadata

NAMES = ["a", "b", "step"]


@pytest.fixture
def truth(tmp_path: Path) -> Metadata:
    save({"a": torch.ones(4), "b": torch.ones(4), "step": 3}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    loaded: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    return loaded


@pytest.fixture(params=["state_dict_metadata", "storage_data"])
def pair(request: Any, tmp_path: Path, truth: Metadata) -> tuple[Any, dict[Any, Any]]:
    """A lazy mapping and the dict that it stands for."""
    return getattr(FileReader(tmp_path).read_metadata(), request.param), getattr(truth, request.param)


@pytest.mark.parametrize(
    "use",
    [
        lambda d: (len(d), bool(d), list(d), list(d.keys()), list(d.values()), list(d.items())),
        lambda d: (dict(d), {**d}, d.copy(), copy.copy(d), copy.deepcopy(d), pickle.loads(pickle.dumps(d))),
        lambda d: (d | {"x": 1}, {"x": 1} | d, list(reversed(d)), repr(d)),
        lambda d: ({}.update(d), dict(d) == d, d == dict(d), d != {}, d == {}),
        lambda d: (d.pop(next(iter(d))), list(d), d.setdefault("x", 1), d.popitem(), len(d)),
        lambda d: (d.update(x=1), d["x"], list(d), d.clear(), len(d)),
        lambda d: (d.__setitem__("x", 2), list(d.items()), d.__delitem__("x"), list(d)),
        lambda d: (d.get("x"), d.get("x", 1), "x" in d, None in d, d.keys() & set(list(d)[:1])),
        lambda d: ([d[key] for key in d], [key in d for key in d], [d.get(key) for key in d], len(d), list(d)),
    ],
)
def test_as_a_dict(pair: tuple[Any, dict[Any, Any]], use: Callable[[Any], Any]) -> None:
    lazy, plain = pair
    assert isinstance(lazy, dict) and isinstance(lazy, LazyDict)
    assert use(lazy) == use(dict(plain))


def test_pickled_again_our_reader_takes_it(tmp_path: Path, truth: Metadata) -> None:
    metadata = FileReader(tmp_path).read_metadata()
    truth.storage_meta = metadata.storage_meta
    assert parse_metadata(pickle.dumps(metadata)) == truth == pickle.loads(pickle.dumps(metadata))


def test_missing_keys(pair: tuple[Any, dict[Any, Any]]) -> None:
    lazy, _ = pair
    for key in ("absent", MetadataIndex("absent"), MetadataIndex("a", [9]), MetadataIndex("a"), 3, ("a",)):
        with pytest.raises(KeyError):
            lazy[key]
        assert key not in lazy and lazy.get(key) is None


def test_entries_are_the_same_object_each_time(pair: tuple[Any, dict[Any, Any]]) -> None:
    lazy, _ = pair
    key = list(lazy)[1]
    first = lazy[key]
    assert lazy[key] is first and dict(lazy)[key] is first
    assert dict(lazy.items())[key] is first and lazy[key] is first


def num_objects() -> int:
    gc.collect()
    return sum(isinstance(one, (MetadataIndex, _StorageInfo)) for one in gc.get_objects())


def test_only_what_is_asked_for_is_made(tmp_path: Path) -> None:
    save({f"w{index}": torch.ones(1) for index in range(500)}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    before = num_objects()
    metadata = FileReader(tmp_path).read_metadata()
    assert len(metadata.storage_data) == len(metadata.state_dict_metadata) == 500
    assert metadata.storage_data[MetadataIndex("w7", [0])].relative_path == "__0_0.distcp"
    assert num_objects() - before < 10


def test_a_load_touches_only_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for all parts would make a million objects on each of a thousand ranks."""
    save({f"w{index}": torch.ones(1) for index in range(50)}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    fill = LazyDict._fill

    def fill_no_parts(self: LazyDict[Any, Any]) -> None:
        assert not isinstance(next(iter(self)), MetadataIndex), f"all {len(self)} parts were made"
        fill(self)

    monkeypatch.setattr(LazyDict, "_fill", fill_no_parts)
    reader = FileReader(tmp_path)
    state = {"w7": torch.zeros(1)}
    load(state, reader, tte.LoadPlanner())
    assert state["w7"].item() == 1
    assert dict.__len__(reader.storage_data) <= 2  # of the first part, and of the one that is read
    tte.load({"w8": torch.zeros(1)}, tmp_path, no_dist=True)


def test_stock_planners_and_tools_take_them(tmp_path: Path) -> None:
    state = mixed_state()
    save(state, FileWriter(tmp_path / "ours", sync=False), dcp.DefaultSavePlanner())
    assert differences(load(blank(state), FileReader(tmp_path / "ours"), dcp.DefaultLoadPlanner()), state) == []
    whole: dict[str, Any] = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(whole, FileReader(tmp_path / "ours"), planner=planner, no_dist=True)
    assert differences(whole, state) == []


def test_what_dcp_save_returns_pickles_as_a_place(tmp_path: Path, truth: Metadata) -> None:
    path = tmp_path / "step-1"
    state = {f"w{index}": torch.ones(3) for index in range(200)}
    metadata = dcp.save(state, storage_writer=FileWriter(path, sync=False), planner=tte.SavePlanner(), no_dist=True)
    assert isinstance(metadata, Metadata)
    expected = pickle.loads((path / ".metadata").read_bytes())
    sent = pickle.dumps(metadata)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received, Metadata)
    assert len(pickle.dumps(received)) < 1000  # not read yet
    assert received == metadata == expected
    assert type(received) is Metadata and list(received.storage_data) == list(expected.storage_data)
    assert dataclasses.replace(metadata, version="2").version == "2"


def test_metadata_that_was_changed_is_sent_whole(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "step-1", sync=False)
    metadata = dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
    metadata.storage_data = {MetadataIndex("w", [0]): _StorageInfo("other", 0, 1)}
    received = pickle.loads(pickle.dumps(metadata))
    assert type(received) is Metadata and vars(received) == vars(metadata)


@pytest.mark.parametrize("field", ["planner_data", "version", "storage_meta", "state_dict_metadata"])
def test_any_field_that_was_changed_is_sent(tmp_path: Path, field: str) -> None:
    writer = FileWriter(tmp_path / "step-1", sync=False)
    metadata: Any = dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
    if field == "state_dict_metadata":
        metadata.state_dict_metadata["other"] = BytesStorageMetadata()
    elif field == "planner_data":
        metadata.planner_data.pop("w")
    else:
        setattr(metadata, field, None)
    received = pickle.loads(pickle.dumps(metadata))
    assert getattr(received, field) == getattr(metadata, field) and received == metadata


def test_a_copy_does_not_need_the_file(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "step-1", sync=False)
    metadata = dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
    copies = [copy.copy(metadata), copy.deepcopy(metadata)]
    shutil.rmtree(tmp_path / "step-1")
    assert copies == [metadata, metadata]
    assert copies[1].state_dict_metadata["w"] is not metadata.state_dict_metadata["w"]


def test_metadata_whose_file_is_gone_or_replaced(tmp_path: Path) -> None:
    def saved() -> Any:
        writer = FileWriter(tmp_path, sync=False)
        return dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)

    first = saved()
    received = pickle.loads(pickle.dumps(first))
    saved()
    with pytest.raises(DamagedCheckpointError, match="another one has saved over it"):
        len(received.planner_data)
    (tmp_path / ".metadata").unlink()
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_stock_writer_after_ours_with_a_cached_plan(tmp_path: Path) -> None:
    """The stock planner keeps the metadata object of the first save for the next one."""
    state = {"w": torch.ones(3)}
    for name, writer in (("a", FileWriter), ("b", dcp.FileSystemWriter), ("c", FileWriter)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer(tmp_path / name), planner=planner, no_dist=True)
        metadata = pickle.loads((tmp_path / name / ".metadata").read_bytes())
        assert type(metadata) is Metadata and metadata.storage_meta.checkpoint_id == tmp_path / name
