"""How far a long save, load or command is: a bar or lines, on the coordinator, and in logs for commands only."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchtitan_ext as tte
from torchtitan_ext.storage import progress
from torchtitan_ext.storage.progress import progress as show

STATE = {"w": torch.zeros(1000, 100), "v": torch.zeros(1000)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_at_once(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stderr, and bars that do not wait. Called in tests, since pytest sets stderr anew."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    return stream


def test_a_save_and_a_load_show_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show_at_once(monkeypatch)
    ends: list[tuple[int, int]] = []

    class Bar(progress.tqdm):  # type: ignore[misc]
        def close(self) -> None:
            ends.append((self.n, self.total))
            super().close()

    monkeypatch.setattr(progress, "tqdm", Bar)
    dcp.save(STATE, storage_writer=tte.FileWriter(tmp_path / "step"))
    dcp.load(STATE, storage_reader=tte.FileReader(tmp_path / "step"))
    (written, total_written), (read, total_read) = ends[0], ends[-1]
    assert total_written == total_read == read == 404_000
    assert 404_000 <= written < 415_000  # with what frames the two records
    assert "save, rank 0:   0%" in terminal.getvalue() and "load, rank 0:   0%" in terminal.getvalue()
    assert "404k" in terminal.getvalue()


def test_short_ones_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show_at_once(monkeypatch)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 1000.0)
    tte.save(STATE, tmp_path / "step")
    assert terminal.getvalue() == ""


def refuse_bars(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a bar was made")


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_the_log_of_a_job_gets_nothing(stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show_at_once(monkeypatch)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "tqdm", refuse_bars)
    tte.save(STATE, tmp_path / "step")
    tte.load(STATE, tmp_path / "step")
    assert stream is None or stream.getvalue() == ""


def test_other_ranks_show_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    show_at_once(monkeypatch)
    monkeypatch.setattr(progress, "tqdm", refuse_bars)
    with show("save", is_coordinator=False, total_bytes=lambda: 1) as advance:
        advance(1)


def test_without_tqdm_there_are_lines_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show_at_once(monkeypatch)
    monkeypatch.setattr(progress, "tqdm", None)
    tte.save(STATE, tmp_path / "step")
    assert re.fullmatch(r"(save, rank 0: 0 of 0 MB in \d+ s\n)+", terminal.getvalue()), terminal.getvalue()
    monkeypatch.setattr(progress, "_LINE_SECONDS", 1000.0)
    with show("verify", is_coordinator=True, total_bytes=lambda: 3_000_000_000) as advance:
        advance(1_500_000_000)
        advance(1_500_000_000)
    assert re.fullmatch(r"verify: 1,500 of 3,000 MB in \d+ s", terminal.getvalue().splitlines()[-1])
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 1000.0)
    with show("verify", is_coordinator=True, total_bytes=lambda: 1) as advance:
        advance(1)
    assert "of 0 MB in" in terminal.getvalue() and terminal.getvalue().count("verify") == 1


class Tee:
    """What jobs put in the place of stderr to have a copy of it: no more than ``print`` needs."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def test_a_stderr_that_does_not_say_what_it_is_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Tee())
    tte.save(STATE, tmp_path, no_dist=True)
    tte.load({"w": torch.ones(1000, 100)}, tmp_path, no_dist=True)
