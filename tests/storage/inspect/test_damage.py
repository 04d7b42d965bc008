"""Bytes that are not what was written: found before they are taken for a tensor's, and named."""

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, load, mixed_state, random_tensor, save
from tier import sampled
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointFailedError, DamagedCheckpointError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.commit.opened import Footers
from torchtitan_ext.storage.inspect import verify as verifying

DATA = "__0_0.distcp"


def small_state() -> dict[str, Any]:
    return {"w": random_tensor((4, 8), torch.float32), "b": random_tensor((5,), torch.bfloat16), "step": 3}


def failure_of(call: Callable[..., Any], *args: Any) -> BaseException | None:
    """What a rank raised inside DCP's wrapper."""
    try:
        call(*args)
    except CheckpointException as error:
        return error.failures[0][0]
    return None


def load_verified(path: Path, targets: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(targets, FileReader(path, "all", thread_count=1), tte.LoadPlanner())


@pytest.mark.parametrize("name", [DATA, ".tte_index", ".metadata"])
def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path, name: str) -> None:
    state = small_state()
    save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    content = (tmp_path / name).read_bytes()
    num_found, positions = 0, sampled(range(len(content)), 0.17, name)
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        (tmp_path / name).write_bytes(damaged)
        loaded = blank(state)
        failure = failure_of(load_verified, tmp_path, loaded)
        if failure is None:
            assert differences(loaded, state) == [], f"byte {position} of {name}"
        else:
            num_found += 1
            assert str(tmp_path) in str(failure) or name == ".metadata", f"byte {position}: {failure}"
    # All of the file is covered, so nothing is harmless in it.
    assert num_found == len(positions)


def test_a_block_is_compared_to_its_last_byte(tmp_path: Path) -> None:
    """A block is read and hashed in parts of 256 KiB, which begin and end anywhere in tensors."""
    state = {f"w{index}": random_tensor((100_003 * (index + 1),), torch.uint8, index) for index in range(6)}
    save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    num_bytes = records_of(tmp_path)[-1].data_offset
    assert num_bytes > 1 << 20
    load_verified(tmp_path, loaded := blank(state))
    assert differences(loaded, state) == []
    for border in range(256 << 10, num_bytes, 256 << 10):
        for position in (border - 1, border):
            flip(tmp_path / DATA, position)
            assert isinstance(failure_of(load_verified, tmp_path, blank(state)), DamagedCheckpointError)
            flip(tmp_path / DATA, position)
    load_verified(tmp_path, blank(state))


def test_the_error_names_file_tensor_and_rows(tmp_path: Path) -> None:
    state = {"a": random_tensor((3,), torch.int64), "w": random_tensor((4096, 256), torch.float32)}
    save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    (fqn_row,) = (row for row in records_of(tmp_path) if row.fqn == "w")
    byte_of_row_3000 = fqn_row.data_offset + 3000 * 1024
    flip(tmp_path / DATA, byte_of_row_3000)
    for verify in ("auto", "all"):
        with pytest.raises(CheckpointFailedError, match="DamagedCheckpointError") as caught:
            tte.load(blank(state), storage_reader=FileReader(tmp_path, verify), no_dist=True)
        text = str(caught.value)
        assert DATA in text and "verify='none'" in text and len(text.splitlines()) <= 5
        rows = text[text.index("w[") + 2 : text.index("]")].split(":")
        assert int(rows[0]) <= 3000 < int(rows[1]) and int(rows[1]) - int(rows[0]) <= 1025
    # The damage is in another block than the other half.
    half = {"a": torch.zeros(3, dtype=torch.int64)}
    assert differences(load(half, FileReader(tmp_path), tte.LoadPlanner()), {"a": state["a"]}) == []
    taken = load(blank(state), FileReader(tmp_path, "none"), tte.LoadPlanner())
    assert differences(taken, state) == ["w"]


def records_of(path: Path) -> list[_core.SavedRecord]:
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    return [record for file in index.files.values() for record in _core.parse_records(file)]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [DATA, ".tte_index"])
def test_a_cut_file_is_found(tmp_path: Path, name: str) -> None:
    state = small_state()
    save(state, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    content = (tmp_path / name).read_bytes()
    for length in range(0, len(content), 13):
        (tmp_path / name).write_bytes(content[:length])
        failure = failure_of(lambda: load(blank(state), FileReader(tmp_path, "auto"), tte.LoadPlanner()))
        assert isinstance(failure, DamagedCheckpointError) and name in str(failure)


def test_a_longer_file_is_found(tmp_path: Path) -> None:
    save(small_state(), FileWriter(tmp_path, sync=False), tte.SavePlanner())
    with (tmp_path / DATA).open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(DamagedCheckpointError, match="expected"):
        tte.load(blank(small_state()), storage_reader=FileReader(tmp_path), no_dist=True)


@pytest.mark.parametrize("verify", ["auto", "all"])
def test_a_file_of_another_save_of_the_same_shapes_is_found(tmp_path: Path, verify: Any) -> None:
    for name in ("step-1", "step-2"):
        save(small_state(), FileWriter(tmp_path / name, sync=False), tte.SavePlanner())
    shutil.copy(tmp_path / "step-1" / DATA, tmp_path / "step-2" / DATA)
    with pytest.raises(DamagedCheckpointError, match="belongs to another save"):
        tte.load(blank(small_state()), storage_reader=FileReader(tmp_path / "step-2", verify), no_dist=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save(small_state(), FileWriter(tmp_path, sync=False), tte.SavePlanner())
    (tmp_path / DATA).unlink()
    failure = failure_of(lambda: load(blank(small_state()), FileReader(tmp_path), tte.LoadPlanner()))
    assert isinstance(failure, FileNotFoundError) and DATA in str(failure)


def test_stock_saving_over_ours_makes_the_index_stale(tmp_path: Path) -> None:
    old, new = mixed_state(), {key: value for key, value in mixed_state().items() if key != "step"}
    new["scalar"] = torch.tensor(9.0)
    save(old, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    save(new, dcp.FileSystemWriter(tmp_path, sync_files=False), tte.SavePlanner())
    with pytest.warns(UserWarning, match="saved over by stock"):
        loaded = load(blank(new), FileReader(tmp_path), tte.LoadPlanner())
    assert differences(loaded, new) == []
    with pytest.raises(DamagedCheckpointError, match="saved over by stock DCP, or .metadata is damaged"):
        tte.load(blank(new), storage_reader=FileReader(tmp_path, "all"), no_dist=True)


def test_an_index_of_another_save_of_the_same_shapes_is_left_aside(tmp_path: Path) -> None:
    states = [small_state() | {"w": random_tensor((4, 8), torch.float32, seed)} for seed in range(2)]
    for number, state in enumerate(states):
        save(state, FileWriter(tmp_path / f"step-{number}", sync=False), tte.SavePlanner())
    shutil.copy(tmp_path / "step-0" / ".tte_index", tmp_path / "step-1")
    with pytest.warns(UserWarning, match="belongs to another .metadata"):
        loaded = load(blank(states[1]), FileReader(tmp_path / "step-1"), tte.LoadPlanner())
    assert differences(loaded, states[1]) == []


def test_saving_over_stock_and_over_ours(tmp_path: Path) -> None:
    states = [small_state() | {"w": random_tensor((4, 8), torch.float32, seed)} for seed in range(3)]
    writers = [dcp.FileSystemWriter(tmp_path), FileWriter(tmp_path, sync=False), FileWriter(tmp_path, sync=False)]
    for state, writer in zip(states, writers, strict=True):
        save(state, writer)
        assert differences(load(blank(state), FileReader(tmp_path)), state) == []


# ---- the index is lost ----


def save_without_index(path: Path, state: dict[str, Any]) -> None:
    tte.save(state, storage_writer=FileWriter(path, sync=False), no_dist=True)
    (path / ".tte_index").unlink()


def kinds_of(path: Path, is_deep: bool = True) -> list[tuple[str, str]]:
    return [(damage.file, damage.kind) for damage in verifying.verify(path, is_deep=is_deep).damages]


LOST = (".tte_index", "lost")


@pytest.mark.parametrize("mode", ["auto", "all"])
def test_without_the_index_files_are_verified_by_their_footers(tmp_path: Path, mode: Any) -> None:
    save_without_index(tmp_path, mixed_state())
    with pytest.warns(UserWarning, match="has no index, so no checksums of .metadata: its data files are verified"):
        loaded = load(blank(mixed_state()), FileReader(tmp_path, mode), tte.LoadPlanner())
    assert differences(loaded, mixed_state()) == []
    assert kinds_of(tmp_path) == kinds_of(tmp_path, is_deep=False) == [LOST]
    (lost,) = verifying.verify(tmp_path).damages
    assert "verified by their own footers, and nothing proves what .metadata says" in lost.what


def test_without_the_index_every_flipped_bit_is_found(tmp_path: Path) -> None:
    state = small_state()
    save_without_index(tmp_path, state)
    content = (tmp_path / DATA).read_bytes()
    for position in [*range(0, len(content), 67), *range(len(content) - 30, len(content), 3)]:
        (tmp_path / DATA).write_bytes(content)
        flip(tmp_path / DATA, position)
        failure = failure_of(load_verified, tmp_path, blank(state))
        assert isinstance(failure, DamagedCheckpointError) and DATA in str(failure), f"byte {position}: {failure}"
        found = kinds_of(tmp_path)
        assert found[0] in ((DATA, "checksum"), (DATA, "footer")) and len(found) <= 2, f"byte {position}: {found}"


def test_without_the_index_the_error_names_file_and_tensor(tmp_path: Path) -> None:
    state = {"w": random_tensor((1024, 512), torch.float32), "b": torch.ones(3)}
    save_without_index(tmp_path, state)
    flip(tmp_path / DATA, 1_300_000)
    text = f"{DATA}: bytes 1048576 to .* do not match their checksum; in them lie w"
    with pytest.warns(UserWarning, match="has no index"), pytest.raises(CheckpointFailedError, match=text):
        tte.load(blank(state), tmp_path, no_dist=True)
    assert text.split(":")[0] in verifying.verify(tmp_path, is_deep=True).damages[0].what
    assert differences(load(blank(state), FileReader(tmp_path, "none"), tte.LoadPlanner()), state) == ["w"]


@pytest.mark.filterwarnings("ignore:.* has no index")
@pytest.mark.parametrize("kind", ["another step", "no footer", "half a footer", "stock", "cut", "the metadata's own"])
def test_without_the_index_files_that_are_not_of_the_save_are_found(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "step-1", tmp_path / "step-2"
    save_without_index(path, small_state())
    save_without_index(other, small_state())
    data = (path / DATA).read_bytes()
    footer = data.rindex(b"TTEFOOTR")
    if kind == "another step":
        shutil.copy(other / DATA, path / DATA)
    elif kind == "the metadata's own":
        shutil.copy(other / ".metadata", path / ".metadata")
    elif kind == "stock":
        save(small_state(), dcp.FileSystemWriter(tmp_path / "stock"))
        shutil.copy(tmp_path / "stock" / DATA, path / DATA)
    else:
        (path / DATA).write_bytes(data[: {"no footer": footer, "half a footer": footer + 9, "cut": footer // 2}[kind]])
    text = "belongs to another save" if kind in ("another step", "the metadata's own") else "does not end with a footer"
    with pytest.raises(DamagedCheckpointError, match=text):
        tte.load(blank(small_state()), storage_reader=FileReader(path), no_dist=True)
    assert kinds_of(path, is_deep=False)[0] == (DATA, "size" if kind == "cut" else "footer")
    assert not verifying.is_whole(path) and verifying.is_whole(other)


def test_without_ids_in_the_metadata_all_footers_are_of_one_save(tmp_path: Path) -> None:
    """As of a storage writer that is a subclass of ours, or of metadata that was put together by hand."""
    footers = Footers("an id of theirs")
    for step in (1, 2):
        save_without_index(tmp_path / f"step-{step}", small_state())
        path = tmp_path / f"step-{step}" / DATA
        with path.open("rb") as stream:
            if step == 1:
                assert footers.find(path, stream.fileno()) is not None and not footers.are_expected
                continue
            with pytest.raises(ValueError, match="step-2/__0_0.distcp: the file belongs to another save"):
                footers.find(path, stream.fileno())


def test_metadata_that_says_other_shapes_than_the_records_is_found_without_the_index(tmp_path: Path) -> None:
    save_without_index(tmp_path, small_state())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert kinds_of(tmp_path) == [(DATA, "record"), LOST]


def test_stock_saving_over_ours_without_an_index_is_stocks(tmp_path: Path) -> None:
    save_without_index(tmp_path, mixed_state())
    save(small_state(), dcp.FileSystemWriter(tmp_path, sync_files=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is")
        loaded = load(blank(small_state()), FileReader(tmp_path), tte.LoadPlanner())
    assert differences(loaded, small_state()) == [] and kinds_of(tmp_path) == []


def test_a_damaged_index_can_be_done_without(tmp_path: Path) -> None:
    save(small_state(), FileWriter(tmp_path, sync=False), tte.SavePlanner())
    flip(tmp_path / ".tte_index", 100)
    with pytest.raises(DamagedCheckpointError, match=r"verify='none'\) reads without the index"):
        tte.load(blank(small_state()), storage_reader=FileReader(tmp_path), no_dist=True)
    with pytest.warns(UserWarning, match="the index is ignored"):
        loaded = load(blank(small_state()), FileReader(tmp_path, "none"), tte.LoadPlanner())
    assert differences(loaded, small_state()) == []


@pytest.mark.parametrize("offset, word", [(12, "needs a reader of version"), (16, "needs features")])
def test_an_older_reader_says_what_it_needs(tmp_path: Path, offset: int, word: str) -> None:
    save(small_state(), FileWriter(tmp_path, sync=False), tte.SavePlanner())
    content = bytearray((tmp_path / ".tte_index").read_bytes())
    content[offset] = 7
    sealed = bytes(content[:-8])
    (tmp_path / ".tte_index").write_bytes(sealed + _core.digest(sealed).to_bytes(8, "little"))
    with pytest.raises(DamagedCheckpointError, match=f"{word}.*7.*upgrade torchtitan_ext"):
        tte.load(blank(small_state()), storage_reader=FileReader(tmp_path), no_dist=True)


def test_unknown_sections_are_skipped_unless_required(tmp_path: Path) -> None:
    save(small_state(), FileWriter(tmp_path, sync=False), tte.SavePlanner())
    path = tmp_path / ".tte_index"
    for flags in (0, 1):
        content = bytearray(path.read_bytes()[:-8])
        content += (
            (99).to_bytes(4, "little") + flags.to_bytes(4, "little") + (3).to_bytes(8, "little") + b"new" + bytes(5)
        )
        content[24:32] = (len(content) + 8).to_bytes(8, "little")
        path.write_bytes(content + _core.digest(bytes(content)).to_bytes(8, "little"))
        if flags:
            with pytest.raises(DamagedCheckpointError, match="needs section 99"):
                tte.load(blank(small_state()), storage_reader=FileReader(tmp_path), no_dist=True)
        else:
            assert differences(load(blank(small_state()), FileReader(tmp_path)), small_state()) == []


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b"])
def test_paths_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    save(small_state(), dcp.FileSystemWriter(tmp_path), tte.SavePlanner())
    reader = FileReader(tmp_path)
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    reader.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
    failure = failure_of(lambda: load(blank(small_state()), reader))
    assert isinstance(failure, DamagedCheckpointError) and "outside of the checkpoint" in str(failure)
