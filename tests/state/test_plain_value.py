"""Which values are read back without running code, and what is said of the others and of damaged bytes."""

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import io
import ipaddress
import pathlib
import pickle
import random
import types
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from torchtitan_ext.state.plain_value import (
    DamagedBytesError,
    NotPlain,
    NotPlainError,
    read_pickle,
    read_value,
    why_not_plain,
)


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    colour: Colour


class Lookup(dict[str, int]):
    """torch.load fills no dict of another class."""


class Hostile:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Hostile, "ran", True))


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


PLAIN = [
    None,
    True,
    2**70,
    1.5,
    2 + 3j,
    "text",
    b"bytes",
    [1, (2, {"three": {4}})],
    frozenset({1}),
    range(3),
    slice(1, 2),
    torch.float32,
    torch.Size([1, 2]),
    torch.device("cpu"),
    datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
    datetime.timedelta(seconds=3),
    decimal.Decimal("1.5"),
    pathlib.PosixPath("/data/shard"),
    pathlib.PurePosixPath("data/shard"),
    pathlib.PureWindowsPath("data/shard"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    array.array("i", [1, 2]),
    argparse.Namespace(lr=0.1, steps=[1, 2]),
    types.SimpleNamespace(lr=0.1),
    ipaddress.ip_address("10.0.0.1"),
    ipaddress.ip_address("::1"),
    np.float32(1.5),
    np.dtype("int64"),
    random.getstate(),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any) -> None:
    assert why_not_plain(value) is None and why_not_plain([{"inside": (value,)}]) is None
    again = read_value(saved(value), weights_only=True)
    assert type(again) is type(value) and again == value


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), np.zeros(0, np.int8)], ids=str)
def test_arrays_come_back(array: np.ndarray) -> None:
    again = read_value(saved({"array": array}), weights_only=True)["array"]
    assert again.dtype == array.dtype and np.array_equal(again, array)


def test_the_random_states_of_a_job_come_back() -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    again = read_value(saved(state), weights_only=True)
    drawn = (random.random(), np.random.rand(), torch.rand(1))
    random.setstate(again["python"])
    np.random.set_state(again["numpy"])
    torch.set_rng_state(again["torch"])
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))


def test_a_stream_comes_back() -> None:
    assert read_value(saved(io.BytesIO(b"losses")), weights_only=True).read() == b"losses"


@pytest.mark.parametrize("value", [Colour.RED, [Colour.RED]], ids=str)
def test_other_values_are_refused_by_name_unless_trusted(value: Any) -> None:
    name = rf"{__name__}.Colour"
    with pytest.raises(NotPlainError, match=rf"not plain data \(found \S*{name}\)$") as caught:
        read_value(saved(value), weights_only=True)
    assert caught.value.found.can_be_allowed
    assert read_value(saved(value), weights_only=False) == value
    assert read_value(saved(value), weights_only=True, allow_classes=[Colour]) == value


def test_all_classes_are_named_at_once() -> None:
    value = {"a": [Settings(Colour.RED)], "b": (ZoneInfo("UTC"), Colour.RED), "c": Lookup(a=1)}
    with pytest.raises(NotPlainError) as caught:
        read_value(saved(value), weights_only=True)
    names = ("getattr", f"{__name__}.Colour", f"{__name__}.Lookup", f"{__name__}.Settings", "zoneinfo.ZoneInfo")
    assert caught.value.found == NotPlain(names, can_be_allowed=False)
    settings = Settings(Colour.RED)
    assert read_value(saved([settings]), weights_only=True, allow_classes=[Settings, Colour]) == [settings]
    with pytest.raises(NotPlainError, match=r"found \S*Settings\)$"):
        read_value(saved([settings]), weights_only=True, allow_classes=[Colour])


def test_what_was_allowed_before_stays_so_and_no_more() -> None:
    with torch.serialization.safe_globals([Colour, bytes]):
        before = set(torch.serialization.get_safe_globals())
        read_value(saved([Settings(Colour.RED)]), weights_only=True, allow_classes=[Settings, Colour])
        assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("value, name", [({"f": print}, "print"), (ZoneInfo("UTC"), "getattr")], ids=str)
def test_nobody_is_told_to_allow_a_builtin_function(value: Any, name: str) -> None:
    with pytest.raises(NotPlainError, match=rf"not plain data \(found {name}\b") as caught:
        read_value(saved(value), weights_only=True)
    assert not caught.value.found.can_be_allowed
    assert read_value(saved(value), weights_only=False) == value
    with pytest.raises(ValueError, match=rf"not plain data \(found builtins.{name}\); store plain data instead"):
        read_pickle(pickle.dumps(value))


class Deep:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no copies of this\nmore text")


NAMED = f"{__name__}.Colour"
MARKED = torch.ones(2)
MARKED.mode = Colour.RED  # type: ignore[attr-defined]
ORDERED = collections.OrderedDict(a=1)
ORDERED.mode = Colour.RED  # type: ignore[attr-defined]
NOT_PLAIN = [
    (ORDERED, NAMED), ([types.SimpleNamespace(mode=[Colour.RED])], NAMED), (frozenset({Colour.RED}), NAMED),
    (Colour.RED, NAMED), ({"a": [1, (Colour.RED,)]}, NAMED), ({Colour.RED: 1}, NAMED), (MARKED, NAMED),
    ((torch.ones(2), Colour.RED), NAMED), (argparse.Namespace(mode=Colour.RED), NAMED),
    (np.array([Colour.RED], dtype=object), NAMED), (collections.deque([1]), "collections.deque"),
    (ZoneInfo("UTC"), "zoneinfo.ZoneInfo"),
    ([print], "builtins.builtin_function_or_method"),
    (TwoTensor(torch.ones(1), torch.ones(1)), "torch.testing._internal.two_tensor.TwoTensor"),
]  # fmt: skip
if torch.__version__ < torch.torch_version.TorchVersion("2.14"):  # later ones take Python's own exceptions
    NOT_PLAIN.append((ValueError("no"), "exceptions.ValueError"))

CANNOT_BE_ALLOWED = (
    "collections.deque", "exceptions.ValueError", "zoneinfo.ZoneInfo", "builtins.builtin_function_or_method",
)  # fmt: skip


@pytest.mark.parametrize("value, name", NOT_PLAIN, ids=lambda value: type(value).__name__)
def test_what_will_not_be_read_is_known_when_it_is_saved(value: Any, name: str) -> None:
    found = why_not_plain(value)
    assert found is not None and found.names == (name,)
    assert found.can_be_allowed == (name not in CANNOT_BE_ALLOWED)
    with pytest.raises(ValueError, match="not plain data"):
        read_value(saved(value), weights_only=True)


def test_what_cannot_be_pickled_is_known_when_it_is_saved() -> None:
    with pytest.raises(TypeError, match=r"^cannot be pickled \(TypeError: no copies of this\)$"):
        why_not_plain([Deep()])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"^cannot be pickled \(RecursionError: "):
        why_not_plain(deep)


def test_a_class_that_the_user_allows_is_plain() -> None:
    with torch.serialization.safe_globals([Colour]):
        assert why_not_plain([Colour.RED]) is None


def test_what_holds_itself_is_looked_at_once() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    assert why_not_plain(cycle) is None and read_value(saved(cycle), weights_only=True)[1]["again"][0] == 1


def test_a_class_that_the_user_allows_is_read() -> None:
    with torch.serialization.safe_globals([Colour]):
        assert read_value(saved(Colour.RED), weights_only=True) is Colour.RED
    with pytest.raises(ValueError, match="not plain data"):
        read_value(saved(Colour.RED), weights_only=True)


def test_a_class_that_torch_cannot_fill_is_not_called_damaged() -> None:
    window = collections.deque([1.5, 2.5])
    with (
        torch.serialization.safe_globals([collections.deque]),
        pytest.raises(NotPlainError, match=r"found collections.deque\)$") as caught,
    ):
        read_value(saved(window), weights_only=True)
    assert not caught.value.found.can_be_allowed
    assert read_value(saved(window), weights_only=False) == window


def test_no_code_runs() -> None:
    for stream in (saved(Hostile()), saved(np.array([Hostile()], dtype=object))):
        with pytest.raises(ValueError, match="not plain data"):
            read_value(stream, weights_only=True)
    assert not Hostile.ran


@pytest.mark.parametrize("weights_only", [True, False])
def test_damaged_bytes_are_called_damaged(weights_only: bool) -> None:
    whole = saved({"step": 3}).getvalue()
    for end in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="its bytes are damaged") as caught:
            read_value(io.BytesIO(whole[:end]), weights_only=weights_only)
        assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_flipped_bit_raises_nothing_but_value_errors(weights_only: bool) -> None:
    whole = saved({"steps": [1, 2, 3], "name": "x" * 40}).getvalue()
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 0x10
        try:
            read_value(io.BytesIO(bytes(flipped)), weights_only=weights_only)
        except ValueError as error:
            assert "damaged" in str(error) or "not plain data" in str(error)


# A torch.dtype pickles as a name to be looked up in torch: not as data.
PICKLED = [value for value in PLAIN if not isinstance(value, torch.dtype)]


@pytest.mark.parametrize("value", [*PICKLED, {1, 2}, bytearray(b"x")], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_of_plain_values_come_back(value: Any, protocol: int) -> None:
    again = read_pickle(pickle.dumps(value, protocol=protocol))
    assert type(again) is type(value) and again == value


def test_pickled_arrays_come_back() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(read_pickle(pickle.dumps({"array": array}))["array"], array)


@pytest.mark.parametrize(
    "value, name",
    [(Colour.RED, "Colour"), ({"f": saved}, "saved"), (Hostile(), "builtins.setattr")],
    ids=["class", "function", "hostile"],
)
def test_pickles_of_other_values_are_refused_and_no_code_runs(value: Any, name: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"not plain data \(found \S*{name}\); (allow its class with torch.serializ|store plain data instead)",
    ):
        read_pickle(pickle.dumps(value))
    with pytest.raises(ValueError, match="not plain data"):
        read_pickle(pickle.dumps(np.array([value], dtype=object)))
    assert not Hostile.ran


def test_a_pickled_class_that_the_user_allows_is_read() -> None:
    with torch.serialization.safe_globals([Colour]):
        assert read_pickle(pickle.dumps(Colour.RED)) is Colour.RED


def test_damaged_pickles_raise_nothing_but_value_errors() -> None:
    whole = pickle.dumps({"steps": [1, 2, 3], "name": "x" * 40})
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="its bytes are damaged"):
            read_pickle(whole[:end])
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 0x10
        try:
            read_pickle(bytes(flipped))
        except ValueError as error:
            assert "damaged" in str(error) or "not plain data" in str(error)


# A dict with a key of tuples in tuples, each of which holds the one before twice.
ENDLESS = b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s."


def archived(pickled: bytes) -> io.BytesIO:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    stream.seek(0)
    return stream


def as_before_1_6(pickled: bytes) -> io.BytesIO:
    heads = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True})
    return io.BytesIO(
        b"".join(pickle.dumps(head, protocol=2) for head in heads) + pickled + pickle.dumps([], protocol=2)
    )


@pytest.mark.parametrize("written", [archived, as_before_1_6])
def test_keys_that_nobody_can_hash_in_time_are_damage(written: Callable[[bytes], io.BytesIO]) -> None:
    assert read_value(written(pickle.dumps({((1, 2), 3): 4}, protocol=2)), weights_only=True) == {((1, 2), 3): 4}
    with pytest.raises(DamagedBytesError, match="too long to hash"):
        read_value(written(ENDLESS), weights_only=True)


def test_keys_of_files_of_old_torch_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(as_before_1_6(ENDLESS).getvalue())
    with pytest.raises(DamagedBytesError, match="too long to hash"):
        read_value(tmp_path / "old.pt", weights_only=True)
