"""Archives of ``torch.save``, looked at without torch: what their pickles need of their storages."""

import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import in_limits
from states import mixed_state
from torch.utils.serialization import config

from torchtitan_ext import _core
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.formats.torch_files import describe_torch
from torchtitan_ext.storage.inspect.verify import verify


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
    assert open_source(tmp_path / "a").state.entries.keys() == {"w"}
    verdict = verify(tmp_path / "a", is_deep=True)
    assert (verdict.damages, verdict.unproved) == ([], ["a"])


def doubled(stream: bytes) -> bytes:
    """Operations that leave sixty tuples in each other on the stack: each holds the one before twice."""
    stream += b"r\x00\x10\0\0"
    for number in range(0x1000, 0x103C):
        old, new = struct.pack("<I", number), struct.pack("<I", number + 1)
        stream += b"0j" + old + b"j" + old + b"\x86r" + new
    return stream


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x03tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE
HOSTILE_PICKLES = {
    "key": b"}" + doubled(b"K\x01") + b"K\x02s",
    "keys": b"}(" + doubled(b"K\x01") + b"K\x02u",
    "member of a set": b"\x8f(" + doubled(b"K\x01") + b"\x90",
    "member of a frozen set": b"(" + doubled(b"K\x01") + b"\x91",
    "key of an argument": b"(" + doubled(b"K\x01") + b"K\x02d",
    "argument of a call": b"ccollections\nCounter\n]" + doubled(b"K\x01") + b"a\x85R",
    "stride": TENSOR + b"K\x00\x8a\x06" + (2**46).to_bytes(6, "little") + b"\x85](K\x01e\x85tR",
    "text as a stride": TENSOR + b"K\x00\x8a\x06" + (2**46).to_bytes(6, "little") + b"\x85X\x01\0\0\0x\x85tR",
    "name of a storage": STORAGE.replace(b"X\x01\0\0\x000", doubled(b"K\x01")),
    "kind of a storage": STORAGE.replace(b"X\x07\0\0\0storage", doubled(b"K\x01")),
    "bytes": b"\x96" + struct.pack("<Q", 2**33),
}


ENDLESS = ["key", "keys", "member of a set", "member of a frozen set", "key of an argument", "argument of a call"]


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_small_pickle_takes_no_long_look(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "a")
    pickled = b"\x80\x05" + HOSTILE_PICKLES[name] + b"."
    hostile = changed(tmp_path / "a", tmp_path / "b", lambda name, data: pickled if name == "data.pkl" else data)
    assert in_limits(lambda: len(verify(hostile).damages) < 2) == "True"
    if name in ENDLESS:
        assert in_limits(lambda: "take too long to hash" in damage(hostile)) == "True"
        assert in_limits(lambda: open_source(hostile)) == "DamagedCheckpointError"
        assert in_limits(lambda: describe_torch(hostile)) == "DamagedCheckpointError"


def made_of(function: Any, argument: Any) -> Any:
    """A value whose pickle makes it by this call, with calls of the same kind as arguments."""

    class Made:
        def __reduce__(self) -> Any:
            return function, (argument,)

    return Made()


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_that_take_for_ever_to_make_are_refused(tmp_path: Path, protocol: int) -> None:
    for function in (frozenset, set, list, bytearray, dict):
        torch.save(made_of(function, made_of(range, 10**12)), tmp_path / "a", pickle_protocol=protocol)
        assert in_limits(lambda: "made of a range of numbers that takes too long" in damage(tmp_path / "a")) == "True"
    torch.save(made_of(Fraction, "1e999999999"), tmp_path / "a", pickle_protocol=protocol)
    assert in_limits(lambda: "an exponent that takes too long" in damage(tmp_path / "a")) == "True"
    plain = {"a": range(10**18), "b": Fraction("1e30"), "c": frozenset([1]), "d": made_of(set, made_of(range, 5))}
    torch.save(plain, tmp_path / "a", pickle_protocol=protocol)
    assert verify(tmp_path / "a").damages == []


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_every_protocol_are_followed_to_their_end(protocol: int) -> None:
    numbers = [-5, 300, 70_000, 10**12, -(10**40), 10**400, 1.5, True, None, 1j]
    texts = ["", "\u00fc\n'", "x" * 300, b"abc", bytearray(b"abc")]
    held = [{(1, 2): [3, {4, 5}]}, frozenset([(6, 7)]), Counter("ab"), Decimal(1), datetime(2026, 1, 1), slice(1, 2)]
    for value in (*numbers, *texts, *held, [numbers, texts, held, held]):
        # An operation that is not known would be an error.
        assert _core.find_storages(pickle.dumps(value, protocol)) == []


def test_entries_that_the_archive_has_no_room_for_are_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    for name in (b"data.pkl", b"byteorder"):
        longer = bytearray(content)
        at = content.rindex(b"a/" + name) - 22  # sizes in the central header
        longer[at - 4 : at + 4] = struct.pack("<II", 2**31, 2**31)
        (tmp_path / "b").write_bytes(longer)
        assert in_limits(lambda: "its entries have" in damage(tmp_path / "b")) == "True"
        assert in_limits(lambda: open_source(tmp_path / "b")) == "DamagedCheckpointError"
