"""Items of plans that storage takes all at once: which of them it can, and that it asks no planner for these."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import differences
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict
from torchtitan_ext.storage.native.planned_items import ListedWrites, writes_of


def state_of_all_kinds() -> dict[str, Any]:
    return {
        "b": torch.arange(24.0).view(4, 6),
        "a": torch.arange(6).to(torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "numbers": [1, 2.5, "text"],
        "bits": torch.tensor([True, False, True]),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    }


def zeros() -> dict[str, Any]:
    state = state_of_all_kinds()
    return {fqn: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for fqn, one in state.items()}


def saved_items(path: Path) -> tuple[tte.FileReader, list[ReadItem]]:
    """A reader of a checkpoint, and the items of all that it holds."""
    reader = tte.FileReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items: list[ReadItem] = []
    for fqn, entry in dict(metadata.state_dict_metadata).items():
        if isinstance(entry, TensorStorageMetadata):
            items += create_read_items_for_chunk_list(fqn, entry, entry.chunks)
        else:
            index, none = MetadataIndex(fqn), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
    return reader, items


class CountingLoad(tte.LoadPlanner):
    """Counts what is asked, in a hook that leaves all methods of the planner as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def local_targets(self, fqns: Any) -> dict[str, torch.Tensor]:
        targets = super().local_targets(fqns)
        self.given += targets
        return targets


class AskedLoad(tte.LoadPlanner):
    """Must be asked for each target."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.asked.append(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)


def test_targets_in_plain_memory_are_filled_without_asking(tmp_path: Path) -> None:
    state = state_of_all_kinds()
    tte.save(state, tmp_path, no_dist=True)
    loaded, planner = zeros(), CountingLoad()
    versions = {fqn: loaded[fqn]._version for fqn in loaded if fqn not in ("numbers", "empty")}
    tte.load(loaded, tmp_path, planner=planner, no_dist=True)
    assert differences(loaded, state) == []
    assert sorted(planner.given) == ["a", "b", "bits", "conjugated", "scalar", "turned"]
    assert all(loaded[fqn]._version > version for fqn, version in versions.items())


def test_a_planner_with_targets_of_its_own_is_asked(tmp_path: Path) -> None:
    state = state_of_all_kinds()
    tte.save(state, tmp_path, no_dist=True)
    loaded, planner = zeros(), AskedLoad()
    tte.load(loaded, tmp_path, planner=planner, no_dist=True)
    assert differences(loaded, state) == []
    assert sorted(planner.asked) == ["a", "b", "bits", "conjugated", "scalar", "turned"]


def test_a_planner_is_asked_by_a_method_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(4.0), "b": torch.arange(2)}
    asked: list[str] = []
    save_planner, load_planner = tte.SavePlanner(), tte.LoadPlanner()
    resolve_data, resolve_tensor = save_planner.resolve_data, load_planner.resolve_tensor

    def noted(resolve: Any) -> Any:
        def call(item: Any) -> Any:
            asked.append((item.index if isinstance(item, WriteItem) else item.dest_index).fqn)
            return resolve(item)

        return call

    monkeypatch.setattr(save_planner, "resolve_data", noted(resolve_data))
    dcp.save(state, storage_writer=tte.FileWriter(tmp_path), planner=save_planner, no_dist=True)
    assert sorted(asked) == ["b", "w"]
    monkeypatch.setattr(load_planner, "resolve_tensor", noted(resolve_tensor))
    loaded = {"w": torch.zeros(4), "b": torch.zeros(2, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=tte.FileReader(tmp_path), planner=load_planner, no_dist=True)
    assert sorted(asked) == ["b", "b", "w", "w"]
    assert differences(loaded, state) == []


def test_a_load_makes_no_object_per_key_of_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of_all_kinds()
    tte.save(state, tmp_path, no_dist=True)
    opened: list[Metadata] = []
    read_metadata = tte.FileReader.read_metadata

    def noted(self: tte.FileReader, **kwargs: Any) -> Metadata:
        opened.append(read_metadata(self, **kwargs))
        return opened[-1]

    monkeypatch.setattr(tte.FileReader, "read_metadata", noted)
    tte.load(zeros(), tmp_path, no_dist=True)
    for mapping in (opened[0].state_dict_metadata, opened[0].storage_data):
        assert isinstance(mapping, LazyDict) and mapping.columns is not None
        assert dict.__len__(mapping) <= 1  # name_metadata asks for the first place


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_elements_that_the_reader_cannot_cast_are_left(tmp_path: Path, dtype: torch.dtype) -> None:
    tte.save({"w": torch.arange(6.0)}, tmp_path, no_dist=True)
    reader, items = saved_items(tmp_path)
    reads = reader._list(items)
    runs, target = _core.RunReader(), torch.zeros(6, dtype=dtype)
    number = reader.open_file(runs, reads.files[0])
    added = reads.add(runs, number, 0, 0, 1 << 20, {"w": target})
    if _core.has_cast("float32", str(dtype).removeprefix("torch.")):
        assert (added.num_bytes, added.left) == (24, [])
        reader.read_runs(runs, reads.files)
        assert torch.equal(target, torch.arange(6.0).to(dtype))
    else:
        assert added.num_bytes == 0 and [position for position, *_ in added.left] == [0]


@pytest.mark.parametrize("shape", [(3, 6), (4, 5), (24,)])
def test_a_box_outside_of_its_target_is_left_to_the_planner(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tte.save({"w": torch.arange(24.0).view(4, 6)}, tmp_path, no_dist=True)
    reader, items = saved_items(tmp_path)
    reads = reader._list(items)
    runs = _core.RunReader()
    number = reader.open_file(runs, reads.files[0])
    assert len(reads.add(runs, number, 0, 0, 1 << 20, {"w": torch.zeros(shape)}).left) == 1


def test_rows_are_added_up_to_a_number_of_bytes(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((4,), float(number)) for number in range(5)}
    tte.save(state, tmp_path, no_dist=True)
    reader, items = saved_items(tmp_path)
    reads = reader._list(items)
    targets = {fqn: torch.zeros(4) for fqn in state}
    runs, ends = _core.RunReader(), [0]
    number = reader.open_file(runs, reads.files[0])
    while ends[-1] < reads.num_rows(0):
        ends.append(reads.add(runs, number, 0, ends[-1], 20, targets).end)
        reader.read_runs(runs, reads.files)
    assert ends == [0, 2, 4, 5] and reads.num_bytes == 80
    assert differences(targets, state) == []


def test_an_item_without_a_record_is_a_key_error(tmp_path: Path) -> None:
    tte.save({"w": torch.zeros(2)}, tmp_path, no_dist=True)
    reader, (item,) = saved_items(tmp_path)
    other = ReadItem(
        LoadItemType.TENSOR, item.dest_index, item.dest_offsets, MetadataIndex("v", item.storage_index.offset),
        item.storage_offsets, item.lengths,
    )  # fmt: skip
    with pytest.raises(KeyError, match="'v'"):
        reader.read_data(LoadPlan([item, other]), tte.LoadPlanner()).wait()


def test_items_are_sorted_as_they_lie_in_the_files(tmp_path: Path) -> None:
    tte.save(state_of_all_kinds(), tmp_path, no_dist=True)
    reader, items = saved_items(tmp_path)
    places = dict(reader.storage_data)
    order = _core.ReadList(
        items[::-1], LoadItemType.BYTE_IO, reader.read_metadata().storage_data.columns
    ).in_file_order()
    found = [places[items[::-1][position].storage_index] for position in order]
    assert [(one.relative_path, one.offset) for one in found] == sorted(
        (one.relative_path, one.offset) for one in found
    )
    assert len(found) == len(items)


class CountingSave(tte.SavePlanner):
    """Must be asked for each value, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_data(self, write_item: Any) -> Any:
        self.asked.append(write_item.index.fqn)
        return super().resolve_data(write_item)


def test_files_are_equal_whether_the_planner_is_asked_or_not(tmp_path: Path) -> None:
    state = state_of_all_kinds()
    planner = CountingSave()
    for name, one in (("straight", tte.SavePlanner()), ("asked", planner)):
        writer = tte.FileWriter(tmp_path / name, fingerprints=True)
        dcp.save(state, storage_writer=writer, planner=one, no_dist=True)
    assert sorted(planner.asked) == sorted([*(fqn for fqn in state if fqn != "numbers"), *("numbers" for _ in [0])])
    records = []
    for name in ("straight", "asked"):
        reader, _ = saved_items(tmp_path / name)
        assert reader._index is not None
        (file,) = reader._index.files.values()
        content = (tmp_path / name / file.name).read_bytes()
        rows = [
            (one.fqn, one.offsets, one.index, one.dtype, one.sizes, one.offset, one.sum)
            for one in _core.parse_records(file)
        ]
        records.append((content[: file.footer_offset], rows))
    assert records[0] == records[1]
    loaded = zeros()
    tte.load(loaded, tmp_path / "straight", prove=True, no_dist=True)
    assert differences(loaded, state) == []


def test_a_save_queues_up_to_the_first_item_that_is_not_at_hand(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((4,), float(number)) for number in range(4)}
    state: dict[str, Any] = {"w0": tensors["w0"], "value": "text", **tensors}
    planner = tte.SavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    writes = writes_of(planner.finish_plan(plans[0]))
    assert isinstance(writes, ListedWrites) and writes.in_core.fqns == ["value", "w0", "w1", "w2", "w3"]
    sources = planner.local_sources(writes.in_core.fqns)
    assert sorted(sources) == ["w0", "w1", "w2", "w3"]
    records = _core.RecordWriter(bytes(tmp_path / "file"), 1 << 20, 1, False)
    queue = partial(writes.in_core.queue, records, takes_sums=False)
    assert queue(0, 1 << 20, sources) == 0, "a value is not at hand"
    assert queue(1, 1, sources) == 2
    assert queue(1, 1 << 20, sources) == 5
    without = {fqn: one for fqn, one in sources.items() if fqn != "w3"}
    assert queue(1, 1 << 20, without) == 4
