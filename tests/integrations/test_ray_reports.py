"""What ``RayCheckpointManager`` tells Ray Train, and what it refuses: in one process, in which Ray's context and its
controller are lists. ``tests/clients/test_ray.py`` has real jobs."""

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.errors import CheckpointFailedError, NoCheckpointError, WrongValueError

pytest.importorskip("ray.train", reason="`make clients` installs Ray", exc_type=ImportError)

from pyarrow.fs import LocalFileSystem
from ray_controller import Controller

from torchtitan_ext.integrations.ray import RayCheckpointManager


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(LocalFileSystem(), str(tmp_path / "runs" / "llama")).in_place() as controller:
        yield controller


def objects() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 2)}


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "no space")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steps_that_are_due_or_asked_for_are_reported_with_their_checkpoint(
    controller: Controller, asynchronous: bool
) -> None:
    with RayCheckpointManager(every=2, asynchronous=asynchronous, **objects()) as manager:
        assert manager.resume() == 0
        for step in range(1, 6):
            manager.report_step({"loss": step}, step=step, save=step == 5)
    names = [None, "step-2", None, "step-4", "step-5"]
    assert controller.reported == [({"loss": step}, name) for step, name in enumerate(names, 1)]
    assert sorted(manager.steps()) == [2, 4, 5]


def test_a_step_that_ray_does_not_know_is_reported_by_resume(controller: Controller) -> None:
    with RayCheckpointManager(**objects()) as manager:
        manager.report_step({}, step=1, save=True)
        manager.save(step=2)
        manager.save(step=3)
    with RayCheckpointManager(**objects()) as manager:
        assert manager.resume() == 3
        assert manager.resume() == 3, "Ray knows them now"
    assert controller.reported[1:] == [({"step": 2}, "step-2"), ({"step": 3}, "step-3")]


@pytest.mark.filterwarnings("ignore:.*1 newer skipped")
def test_a_damaged_step_stays_where_ray_has_it_and_is_not_listed_twice(controller: Controller) -> None:
    with RayCheckpointManager(**objects()) as manager:
        manager.report_step({}, step=4, save=True)
        manager.report_step({}, step=8, save=True)
    part = next(Path(controller.folder, "step-8").glob("*.distcp"))
    part.write_bytes(b"\0" * part.stat().st_size)
    with RayCheckpointManager(**objects()) as manager:
        assert manager.resume() == 4
        manager.report_step({}, step=5, save=True)
        manager.wait()
        assert part.exists(), "a save below it sets it not aside"
        manager.report_step({}, step=8, save=True)
    assert controller.reported[2:] == [({}, "step-5"), ({}, None)], (
        "Ray has it already, and would remove it as an old one"
    )
    assert RayCheckpointManager(**objects()).resume() == 8


def test_with_warnings_ray_learns_of_a_step_when_it_is_known_whether_it_was_saved(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write, is_everywhere = tte.FileWriter.write_data, False

    def refuse(writer: Any, *arguments: Any) -> Any:
        if is_everywhere or controller.folder in str(writer.path):
            no_space()
        return write(writer, *arguments)

    with RayCheckpointManager(every=1, on_error="warn", fallback=str(tmp_path / "near"), **objects()) as manager:
        manager.report_step({"n": 1}, step=1)
        manager.wait()
        assert controller.reported == []
        monkeypatch.setattr(tte.FileWriter, "write_data", refuse)
        manager.report_step({"n": 2}, step=2)
        result = manager.wait()
        assert result is not None and "near" in result.path
        is_everywhere = True
        manager.report_step({"n": 3}, step=3)
        result = manager.wait()
        assert result is not None and "no space" in result.error
        assert controller.reported == [({"n": 1}, "step-1"), ({"n": 2}, None)]
    assert controller.reported[2:] == [({"n": 3}, None)]


def test_after_an_error_of_the_loop_nothing_is_reported_any_more(controller: Controller) -> None:
    with pytest.raises(RuntimeError, match="of the loop"):
        with RayCheckpointManager(every=1, on_error="warn", **objects()) as manager:
            manager.report_step({}, step=1)
            raise RuntimeError("of the loop")
    assert controller.reported == [] and manager.steps() == [1]


def test_a_save_that_storage_refuses_ends_the_report(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tte.FileWriter, "write_data", no_space)
    manager = RayCheckpointManager(every=1, **objects())
    with pytest.raises(CheckpointFailedError, match="no space"):
        manager.report_step({}, step=1)
    assert controller.reported == []


def test_checkpoints_of_another_program_are_not_begun_over(controller: Controller) -> None:
    controller.listed.append(f"{controller.folder}/checkpoint_2026")
    with pytest.raises(NoCheckpointError, match=r"has no step, but Ray has 1 checkpoint.*checkpoint_2026.*tte\.load"):
        RayCheckpointManager(**objects()).resume()


def test_what_the_manager_refuses(controller: Controller) -> None:
    with pytest.raises(WrongValueError, match=r"got keep=3, but .*num_to_keep"):
        RayCheckpointManager(keep=3, **objects())
    with pytest.raises(TypeError, match="step"):
        RayCheckpointManager(**objects()).report_step({}, step="3")  # type: ignore[arg-type]
    with pytest.raises(WrongValueError, match=r"got step=3, but Ray starts the loop anew"):
        RayCheckpointManager(**objects()).resume(step=3)
    controller.storage.storage_filesystem = SimpleNamespace(type_name="hdfs")
    with pytest.raises(WrongValueError, match=r"storage is a 'hdfs', expected one of \['gcs', 'local', 's3'\]"):
        RayCheckpointManager(**objects())
    controller.storage = None
    with pytest.raises(WrongValueError, match="local mode"):
        RayCheckpointManager(**objects())
    controller.num_workers = 2
    with pytest.raises(
        WrongValueError, match=r"2 workers run this loop, and the process group has 1 rank.*TorchTrainer"
    ):
        RayCheckpointManager(**objects())
