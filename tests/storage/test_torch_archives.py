"""Archives of ``torch.save``, looked at without torch: what their pickles need of their storages."""

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import mixed_state
from torch.utils.serialization import config

from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.verify import verify


def changed(source: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy of an archive with other bytes in its entries, or without them."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            data = change(entry.filename.partition("/")[2], old.read(entry))
            if data is not None:
                new.writestr(entry.filename, data)
    return target


def damage(path: Path) -> str:
    quick, deep = (verify(path, is_deep=is_deep).damages for is_deep in (False, True))
    assert quick == deep
    (found,) = quick
    assert found.file == path.name
    return found.what


class Args:
    """A class that nobody who verifies knows."""

    def __init__(self) -> None:
        self.values = {"mean": torch.arange(3.0)}


def test_whatever_torch_saves_is_whole(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        **mixed_state(),
        "module": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
        "ordered": OrderedDict(a=torch.ones(2)),
        "set": {1, frozenset({2})},
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        "per channel": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "storage": torch.arange(3.0).untyped_storage(),
        "typed storage": torch.arange(3.0).storage(),
        "args": Args(),
        "generator": torch.Generator().get_state(),
        "dtype": torch.float8_e5m2,
        "attributes": torch.nn.Parameter(torch.ones(2)),
        "text": "a" * 70_000,
    }
    state["attributes"].note = Args()
    for name, protocol in (("a", 2), ("b", 5)):
        torch.save(state, tmp_path / name, pickle_protocol=protocol)
        assert verify(tmp_path / name).damages == verify(tmp_path / name, is_deep=True).damages == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint64, torch.bool, torch.complex128])
def test_a_storage_that_is_too_short_is_damage(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.zeros(4, 5, dtype=dtype)
    torch.save({"w": matrix.t()[1:], "v": torch.ones(2)}, tmp_path / "a")
    cut = changed(tmp_path / "a", tmp_path / "b", lambda name, data: data[:-1] if name == "data/0" else data)
    num_bytes = matrix.nbytes
    assert f"storage 0 has {num_bytes - 1} bytes, what is in it needs {num_bytes}" in damage(cut)
    lost = changed(tmp_path / "a", tmp_path / "c", lambda name, data: None if name == "data/1" else data)
    assert "storage 1 has 0 bytes, what is in it needs 8" in damage(lost)


def test_a_tensor_that_ends_behind_its_storage_is_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4, 5)}, tmp_path / "a")
    # Sizes (4, 5) become (5, 5): K is the code of a number below 256.
    longer = changed(
        tmp_path / "a", tmp_path / "b", lambda name, data: data.replace(b"K\x04K\x05\x86", b"K\x05K\x05\x86")
    )
    assert "storage 0 has 80 bytes, what is in it needs 100" in damage(longer)


def test_a_pickle_that_ends_early_or_is_lost_is_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4, 5)}, tmp_path / "a")
    whole = zipfile.ZipFile(tmp_path / "a").read("a/data.pkl")
    for part in (b"", whole[:1], whole[:30], whole[:150]):
        cut = changed(tmp_path / "a", tmp_path / "b", lambda name, data: part if name == "data.pkl" else data)  # noqa: B023
        assert "its pickle cannot be read" in damage(cut)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "made",)

    torch.save({"w": torch.zeros(3), "evil": Hostile()}, tmp_path / "a")
    assert verify(tmp_path / "a", is_deep=True).damages == []
    assert not (tmp_path / "made").exists()


def test_files_without_crc_are_read(tmp_path: Path) -> None:
    with config.patch("save.compute_crc32", False):
        torch.save({"w": torch.zeros(3)}, tmp_path / "a")
    assert open_source(tmp_path / "a").metadata.state_dict_metadata.keys() == {"w"}
    verdict = verify(tmp_path / "a", is_deep=True)
    assert (verdict.damages, verdict.unproved) == ([], ["a"])
