"""Files that are not what was saved: lost sectors, files of other ranks, steps and checkpoints, entries that changed
places. Each is found before its bytes are taken for a tensor's, and named, in few lines."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import differences, random_tensor

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, DamagedCheckpointError
from torchtitan_ext.storage import FileReader, FileWriter

SECTOR = 4096


def own_state(rank: int, seed: int) -> dict[str, Any]:
    return {f"rank_{rank}.{name}": random_tensor((300, 1000), torch.float32, seed + rank) for name in ("a", "b")}


def save_steps(rank: int, world_size: int, run: Path) -> None:
    for step in (1, 2):
        tte.save(own_state(rank, 10 * step), storage_writer=FileWriter(run / f"step-{step}", sync=False))


@pytest.fixture(scope="module")
def saved(run_world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved")
    run_world(2, save_steps, path)
    return path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def zero_a_sector(run: Path) -> None:
    with (run / "step-2" / "__1_0.distcp").open("r+b") as stream:
        stream.seek(200 * SECTOR)
        stream.write(bytes(SECTOR))


def swap_sectors(run: Path) -> None:
    with (run / "step-2" / "__1_0.distcp").open("r+b") as stream:
        content = bytearray(stream.read())
        one, other = slice(100 * SECTOR, 101 * SECTOR), slice(250 * SECTOR, 251 * SECTOR)
        content[one], content[other] = content[other], content[one]
        stream.seek(0)
        stream.write(content)


def cut(run: Path) -> None:
    os.truncate(run / "step-2" / "__1_0.distcp", 1_000_000)


def cut_to_nothing(run: Path) -> None:
    os.truncate(run / "step-2" / "__1_0.distcp", 0)


def delete(run: Path) -> None:
    (run / "step-2" / "__1_0.distcp").unlink()


def swap_ranks(run: Path) -> None:
    directory = run / "step-2"
    (directory / "__0_0.distcp").rename(directory / "x")
    (directory / "__1_0.distcp").rename(directory / "__0_0.distcp")
    (directory / "x").rename(directory / "__1_0.distcp")


def take_from_another_step(run: Path) -> None:
    shutil.copy(run / "step-1" / "__1_0.distcp", run / "step-2")


def take_index_and_file_from_another_step(run: Path) -> None:
    take_from_another_step(run)
    shutil.copy(run / "step-1" / ".tte_index", run / "step-2")


def take_metadata_from_another_step(run: Path) -> None:
    shutil.copy(run / "step-1" / ".metadata", run / "step-2")


def swap_entries(run: Path) -> None:
    path = run / "step-2" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    data = metadata.storage_data
    one, other = places["rank_1.a"], places["rank_1.b"]
    data[one], data[other] = data[other], data[one]
    path.write_bytes(pickle.dumps(metadata))


def put_a_directory_there(run: Path) -> None:
    delete(run)
    (run / "step-2" / "__1_0.distcp").mkdir()


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (zero_a_sector, r"__1_0.distcp: bytes 0 to 1048576 do not match their checksum; in them lie rank_1.a\[0:\d+\]"),
    (swap_sectors, r"__1_0.distcp: bytes 0 to 1048576 do not match .* rank_1.a\[0:\d+\]"),
    (cut, r"__1_0.distcp: byte 1000000: the file has 1000000 bytes, expected"),
    (cut_to_nothing, r"__1_0.distcp: byte 0: the file has 0 bytes, expected"),
    (delete, r"No such file or directory: .*step-2/__1_0.distcp"),
    (swap_ranks, r"__[01]_0.distcp: byte \d+: .*(footer|belongs|has \d+ bytes)"),
    (take_from_another_step, r"__1_0.distcp: byte \d+: the file belongs to another save"),
    (take_index_and_file_from_another_step, r"the .metadata beside .*step-2/.tte_index is not the one that was saved"),
    (take_metadata_from_another_step, r"the .metadata beside .*step-2/.tte_index is not the one that was saved"),
    (swap_entries, r"the .metadata beside .*step-2/.tte_index is not the one that was saved"),
    (put_a_directory_there, r"__1_0.distcp"),
]


@pytest.mark.parametrize("verify", ["auto", "all"])
@pytest.mark.parametrize(("fault", "text"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_what_is_not_what_was_saved_is_found_and_named(
    run: Path, fault: Callable[[Path], None], text: str, verify: Any
) -> None:
    fault(run)
    state = own_state(0, 0) | own_state(1, 0)
    with pytest.raises((DamagedCheckpointError, CheckpointFailedError), match=text) as found:
        tte.load(state, storage_reader=FileReader(run / "step-2", verify), no_dist=True)
    assert len(str(found.value).splitlines()) <= 5
    with pytest.warns(UserWarning, match="step 1 is loaded, 1 newer skipped"):
        tte.load(state, run, step="last-good", no_dist=True)
    assert differences(state, own_state(0, 10) | own_state(1, 10)) == []
