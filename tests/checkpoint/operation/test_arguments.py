"""Wrong arguments of save and load: one sentence with the argument, what was got, what was expected."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError

STATE: dict[str, Any] = {"w": torch.ones(2)}
LINEAR = nn.Linear(1, 1)

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a module for a state dict": (
        lambda call, path: call(LINEAR, path),
        "got state_dict=a Linear, expected a dict: {'model': model}, or model.state_dict()",
    ),
    "exchanged": (lambda call, path: call(path, STATE), "got the path first and the state dict second; exchange them"),
    "a list for a state dict": (
        lambda call, path: call([STATE], path),
        "got state_dict=a list, expected a dict such as",
    ),
    "a number for a path": (lambda call, path: call(STATE, 3), "got path=3, expected a directory"),
    "a class for a planner": (
        lambda call, path: call(STATE, path, planner=tte.SavePlanner),
        "got planner=the class SavePlanner, expected a",
    ),
    "the other planner": (
        lambda call, path: call(STATE, path, planner=tte.LoadPlanner() if call is not tte.load else tte.SavePlanner()),
        "Planner, expected a",
    ),
    "a class of components": (
        lambda call, path: call({"lr": tte.elastic.RngState}, path),
        "got the class RngState for lr, expected an instance of it",
    ),
    "a name for a group": (
        lambda call, path: call(STATE, path, process_group="dp"),
        "got process_group='dp', expected",
    ),
}


@pytest.mark.parametrize("call", [tte.save, tte.load, tte.async_save])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(tmp_path: Path, call: Callable[..., Any], name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(TypeError, match=f"^{call.__name__}: .*{re.escape(text)}") as caught:
        make(call, str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [tte.save, tte.load, tte.async_save])
def test_times_to_wait(tmp_path: Path, call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=f"^{call.__name__}: got timeout_seconds='3', expected a number of seconds"):
        call(STATE, tmp_path, timeout_seconds="3")
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^{call.__name__}: got timeout_seconds={wrong}, expected more than 0"):
            call(STATE, tmp_path, timeout_seconds=wrong)
    assert not list(tmp_path.iterdir())


def test_storage_of_the_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save: got storage_writer=a FileSystemReader, expected a DCP storage writer"):
        tte.save(STATE, storage_writer=FileSystemReader(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="save: got storage_writer=the class FileSystemWriter, expected a DCP storage"):
        tte.save(STATE, storage_writer=FileSystemWriter)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load: got storage_reader=a FileSystemWriter, expected a DCP storage reader"):
        tte.load(STATE, storage_reader=FileSystemWriter(tmp_path))  # type: ignore[arg-type]


def test_a_rank_outside_of_the_group() -> None:
    with pytest.raises(ValueError, match="save: this rank is not in the process group; call it on the group's ranks"):
        tte.save(STATE, "nowhere", process_group=-100)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [tte.save, tte.load, tte.async_save])
def test_a_place_is_needed(call: Any) -> None:
    with pytest.raises(ValueError, match=f"{call.__name__}: got neither a path nor storage"):
        call({"step": 1})


def test_where_a_fallback_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = OnStorageError(fallback="other")
    place = Path(str(relative.place_of("run/step-1/")))
    monkeypatch.chdir("/")
    assert relative.place_of(tmp_path / "run" / "step-1") == str(place)
    assert place.name == "step-1" and place.parent.parent == tmp_path / "other"
    assert re.fullmatch("run-[0-9a-f]{12}", place.parent.name)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert relative.place_of(tmp_path / "link" / "step-1") == str(place)  # the same run by another path
    others = [
        relative.place_of(path) for path in (tmp_path / "a/run/step-1", "gs://a/run/step-1", "gs://b/run/step-1/")
    ]
    assert len({str(place), *others}) == 4
    assert re.fullmatch("s3://bucket/run-.{12}/step-1", OnStorageError(fallback="s3://bucket").place_of("run/step-1"))
    assert OnStorageError().place_of("run/step-1") is None
