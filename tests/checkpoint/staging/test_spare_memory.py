"""The memory of a save without a stager of its own is there for the next one, and not for ever."""

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eventually import eventually
from support.states import differences

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.staging import host_buffers
from torchtitan_ext.checkpoint.staging.host_buffers import SPARE


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """The pieces of memory that were made, as far as they live."""
    pieces: list[weakref.ref[Any]] = []
    make = host_buffers._memory_of_large_pages

    def noted(num_bytes: int) -> torch.Tensor:
        memory = make(num_bytes)
        pieces.append(weakref.ref(memory.untyped_storage()))
        return memory

    SPARE.clear()
    monkeypatch.setattr(host_buffers, "_memory_of_large_pages", noted)
    yield pieces
    SPARE.clear()


def state_of(number: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), number), "b": torch.full((3,), -number)}


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    tte.async_save(state, path).result()


def spare_bytes() -> list[int]:
    with SPARE._lock:
        found = SPARE._all()
        for one in found:
            SPARE.give(one)
    return [one.numel() for one in found]


def test_later_saves_make_no_memory(tmp_path: Path, made: list[Any]) -> None:
    for number in range(3):
        save(state_of(float(number), 1000 - number), tmp_path / str(number))
        assert len(spare_bytes()) == 1
    assert len(made) == 1
    for number in range(3):
        loaded = state_of(-1.0, 1000 - number)
        tte.load(loaded, tmp_path / str(number), no_dist=True)
        assert differences(loaded, state_of(float(number), 1000 - number)) == []


def test_a_larger_state_gets_larger_memory_and_the_smaller_goes(tmp_path: Path, made: list[Any]) -> None:
    save(state_of(1.0), tmp_path / "small")
    (small,) = spare_bytes()
    save(state_of(1.0, 5000), tmp_path / "large")
    (large,) = spare_bytes()
    assert len(made) == 2 and large > small


def test_a_save_does_not_wait_for_the_memory_of_another_one(
    tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write_data = tte.FileWriter.write_data

    def wait(self: tte.FileWriter, *args: Any) -> Any:
        if Path(self.path).name == "first":
            assert goes_on.wait(60)
        return write_data(self, *args)

    monkeypatch.setattr(tte.FileWriter, "write_data", wait)
    first = tte.async_save(state_of(1.0), tmp_path / "first")
    save(state_of(2.0), tmp_path / "second")
    goes_on.set()
    first.result()
    assert len(made) == 2
    for name, number in (("first", 1.0), ("second", 2.0)):
        loaded = state_of(0.0)
        tte.load(loaded, tmp_path / name, no_dist=True)
        assert differences(loaded, state_of(number)) == []


def test_it_goes_after_a_time_without_saves(tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPARE, "KEPT_SECONDS", 0.2)
    save(state_of(1.0), tmp_path / "a")
    eventually(lambda: not spare_bytes())  # it is judged right behind the end of the save


def test_it_is_not_kept_where_the_host_has_little_left(
    tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_buffers, "_available_bytes", lambda: 8000)
    save(state_of(1.0), tmp_path / "a")
    eventually(lambda: not spare_bytes())  # it is judged right behind the end of the save
    monkeypatch.setattr(host_buffers, "_available_bytes", lambda: 1 << 20)
    save(state_of(1.0), tmp_path / "b")
    assert len(spare_bytes()) == 1


def test_what_outlives_its_save_is_not_spare(made: list[Any]) -> None:
    buffers = host_buffers.HostBuffers(1, is_pinned=False, spare=SPARE)
    taken = buffers.take(100)
    buffers.close()
    del taken
    assert spare_bytes() == []
    buffers = host_buffers.HostBuffers(1, is_pinned=False, spare=SPARE)
    taken = buffers.take(100)
    del taken
    buffers.close()
    assert spare_bytes() == [100]


def test_what_the_host_has_left_is_some_of_its_memory() -> None:
    assert 0 < host_buffers._available_bytes() < 1 << 50
