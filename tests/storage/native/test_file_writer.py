"""What is written, what goes wrong meanwhile, and in which order planners are asked."""

import inspect
import io
import os
import pickle
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm_processes
from states import blank, differences, load, mixed_state, save, without_strides
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.commit import commit
from torchtitan_ext.storage.native import file_writer


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    save(mixed_state(), FileWriter(tmp_path / "a" / "b"))
    assert sorted(os.listdir(tmp_path / "a" / "b")) == [".metadata", ".tte_index", "__0_0.distcp"]
    metadata: Metadata = pickle.loads((tmp_path / "a" / "b" / ".metadata").read_bytes())
    stock = tmp_path / "stock"
    save(mixed_state(), dcp.FileSystemWriter(stock))
    expected: Metadata = pickle.loads((stock / ".metadata").read_bytes())
    for entry in expected.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = without_strides(entry.properties)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.planner_data == expected.planner_data and metadata.version == expected.version
    assert metadata.storage_data.keys() == expected.storage_data.keys()
    indices = {index: index.index for index in expected.storage_data}
    assert {index: index.index for index in metadata.storage_data} == indices


def test_it_is_picklable() -> None:
    writer = pickle.loads(pickle.dumps(FileWriter("somewhere", sync=False, thread_count=3)))
    assert (writer.path, writer.sync, writer.thread_count) == (Path("somewhere"), False, 3)
    reader = pickle.loads(pickle.dumps(FileReader("somewhere", "all")))
    assert (reader.path, reader.verify) == (Path("somewhere"), "all")


@pytest.mark.parametrize("make", [FileWriter, FileReader])
def test_bad_options_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="thread_count: got 0, expected at least 1"):
        make("somewhere", thread_count=0)
    with pytest.raises(ValueError, match="got verify='some'"):
        FileReader("somewhere", "some")  # type: ignore[arg-type]


@pytest.mark.parametrize("thread_count", [1, 2, 8])
def test_any_number_of_threads_writes_the_same(tmp_path: Path, thread_count: int) -> None:
    state = {"w": torch.rand(1500, 1000), "v": torch.rand(700, 900).t(), "b": torch.rand(5)}
    save(state, FileWriter(tmp_path / "one", thread_count=1))
    save(state, FileWriter(tmp_path / "several", thread_count=thread_count))
    contents = [(tmp_path / name / "__0_0.distcp").read_bytes() for name in ("one", "several")]
    end = len(contents[0]) - 200  # the footers differ in their save ids
    assert contents[0][:end] == contents[1][:end]
    assert differences(load(blank(state), FileReader(tmp_path / "several", "all")), state) == []


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(FileWriter, dcp.FileSystemWriter), (FileReader, dcp.FileSystemReader)],
    ids=["writer", "reader"],
)
def test_what_stocks_constructors_take_is_taken_by_keyword(tmp_path: Path, ours: Any, stock: Any) -> None:
    parameters = inspect.signature(stock).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    assert defaults and ours(tmp_path, **defaults).path == tmp_path


def test_stocks_sync_files_is_sync(tmp_path: Path) -> None:
    assert FileWriter(tmp_path, sync_files=True).sync and not FileWriter(tmp_path, sync_files=False).sync
    assert not FileWriter(tmp_path, sync=False, sync_files=False).sync


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"single_file_per_rank": False}, "got single_file_per_rank=False, expected True: an index has one file"),
        ({"cache_staged_state_dict": True}, "got cache_staged_state_dict=True, expected False: .* call tte.async_save"),
        (
            {"serialization_format": SerializationFormat.SAFETENSORS},
            "got serialization_format=.* HuggingFaceStorageWriter",
        ),
        ({"_extensions": ["zstd"]}, "got _extensions=.*, expected none: they change the bytes"),
        ({"sync": False, "sync_files": True}, "got sync=False, sync_files=True, expected False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_followed_of_them_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(WrongValueError, match=f"FileWriter: {text}"):
        FileWriter(tmp_path, **options)


def test_overwrite_is_asked_for(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))
    with pytest.raises(
        CheckpointException, match="Checkpoint already exists: .* has a checkpoint; pass overwrite=True"
    ):
        save({"w": torch.zeros(3)}, FileWriter(tmp_path, overwrite=False))
    assert differences(load({"w": torch.zeros(3)}, FileReader(tmp_path)), {"w": torch.ones(3)}) == []
    with pytest.warns(UserWarning, match="is overwritten"):
        save({"w": torch.zeros(3)}, FileWriter(tmp_path))


def test_one_rank_says_that_a_checkpoint_is_overwritten(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in range(3):
            writer = FileWriter(tmp_path)
            writer.set_up_storage_writer(rank == 0, rank=rank)
            writer.prepare_local_plan(SavePlan([]))
    assert len(caught) == 1


def test_who_reads_a_file_keeps_it_while_it_is_written_anew(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))
    with (tmp_path / "__0_0.distcp").open("rb") as stream:
        before = stream.read()
        stream.seek(0)
        save({"w": torch.zeros(3000)}, FileWriter(tmp_path))
        assert stream.read() == before


class Recording(dcp.DefaultSavePlanner):
    """Notes what it is asked for, and gives copies that only live as long as the writer holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.asked.append(write_item.index.fqn)
        value = super().resolve_data(write_item)
        return value.clone() if isinstance(value, torch.Tensor) else value


def test_planners_are_asked_once_and_values_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "BATCH_BYTES", 1000)
    ours, stock = Recording(), Recording()
    state = mixed_state()
    save(state, FileWriter(tmp_path / "ours"), ours)
    save(state, dcp.FileSystemWriter(tmp_path / "stock"), stock)
    assert sorted(ours.asked) == sorted(stock.asked)
    values = [name for name in ours.asked if not isinstance(state.get(name), torch.Tensor)]
    assert ours.asked[: len(values)] == values and len(values) >= 3
    assert differences(load(blank(state), FileReader(tmp_path / "ours", "all")), state) == []


def test_a_failing_planner_is_the_error_of_the_future(tmp_path: Path) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            raise KeyError("gone")

    planner = Failing()
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    writer = FileWriter(tmp_path)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    future = writer.write_data(plan, planner)
    with pytest.raises(KeyError, match="gone"):
        future.wait()
    assert not (tmp_path / ".metadata").exists()


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_SHOWN_SECONDS", 0.0)
    writer = FileWriter(tmp_path)
    writer.set_up_storage_writer(False, rank=3)
    with pytest.raises(RuntimeError, match="not in a shared directory: rank 3 does not see"):
        writer.write_data(SavePlan([]), dcp.DefaultSavePlanner()).wait()


# Runs in a process of its own: the limit holds for all of a process.
LIMITED = """
import resource, signal, sys, torch, torch.distributed.checkpoint as dcp
from torchtitan_ext.storage import FileWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
state = {f"t{i}": torch.ones(300, 1000) for i in range(20)}
try:
    dcp.save(state, storage_writer=FileWriter(sys.argv[1], sync=False, thread_count=int(sys.argv[2])), no_dist=True)
except dcp.api.CheckpointException as error:
    failure = error.failures[0][0]
    print(type(failure).__name__, failure.errno, failure.filename, failure)
else:
    print("saved")
"""


@pytest.mark.parametrize("thread_count", [1, 2, 8])
@pytest.mark.parametrize("limit_bytes", [5_000_000, 24_000_000])
def test_a_write_that_fails_in_any_thread_fails_the_save(tmp_path: Path, thread_count: int, limit_bytes: int) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY and signal.SIGXFSZ
    arguments = ["-c", LIMITED, tmp_path, thread_count, limit_bytes]
    answer = warm_processes.run(arguments, capture_output=True, check=True).stdout
    assert answer.startswith("OSError 27") and "__0_0.distcp" in answer and "cannot write at byte" in answer
    assert not (tmp_path / ".metadata").exists()


def test_a_directory_without_permission_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointException, match="FileExistsError|NotADirectoryError"):
        save({"w": torch.ones(3)}, FileWriter(tmp_path / "file"))


def test_a_rank_with_nothing_to_write_has_no_file(tmp_path: Path) -> None:
    save({}, FileWriter(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".metadata", ".tte_index"]
    load({}, FileReader(tmp_path, "all"))
