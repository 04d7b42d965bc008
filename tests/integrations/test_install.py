"""Ours inside plain ``dcp.save``, ``dcp.load`` and ``dcp.async_save``: what is replaced, and what is left alone."""

import functools
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from random_states import are_equal, blank
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    _async_process_executor,
    format_utils,
    load,
    save,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext.errors import CannotInstallError
from torchtitan_ext.integrations.install import POINTS

pytestmark = pytest.mark.filterwarnings("ignore")
STOCK = {(point.owner, point.name): getattr(point.owner, point.name) for point in POINTS}


def is_stock() -> bool:
    return all(getattr(owner, name) is function for (owner, name), function in STOCK.items())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    tte.integrations.uninstall()
    assert is_stock()


def is_native(path: Path) -> bool:
    """Whether our files were written, by their index."""
    return any("tte" in file.name for file in path.iterdir())


def plain_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True, **options)


def outcome(state: dict[str, Any], path: Path, **options: Any) -> str:
    target = blank(state)
    try:
        dcp.load(target, checkpoint_id=path, no_dist=True, **options)
    except (Exception, CheckpointException) as error:
        return f"refused: {error}"
    return "equal" if are_equal(state, target) else "wrong"


class Outsider:
    """A class that nothing allows to be loaded."""


def test_classes_that_a_load_may_take(tmp_path: Path) -> None:
    dcp.save({"hook": Outsider()}, checkpoint_id=tmp_path, no_dist=True)
    state: dict[str, Any] = {"hook": None}
    with (
        tte.integrations.installed(),
        pytest.raises(CheckpointException, match=r"allow_classes=\[\S*Outsider\] to .* tte.install"),
    ):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    with tte.integrations.installed(allow_classes=[Outsider]):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert isinstance(state["hook"], Outsider)


def nine_rows(rank: int, world_size: int, path: Path, is_installed: bool) -> str:
    """dp 4 x tp 2, which stock saves and cannot load back."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(3, 9, bias=False)
    whole = torch.arange(27.0).view(9, 3)
    with torch.no_grad():
        linear.weight.copy_(whole)
    model = nn.Sequential(linear)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    if is_installed:
        tte.install()
    try:
        dcp.save({"w": weight}, checkpoint_id=path)
        saved = weight.to_local().clone()
        with torch.no_grad():
            weight.to_local().zero_()
        dcp.load({"w": weight}, checkpoint_id=path)
        return "equal" if torch.equal(weight.to_local(), saved) else "wrong"
    except CheckpointException as error:
        return f"refused: {error}"
    finally:
        tte.integrations.uninstall()


def load_whole(rank: int, world_size: int, path: Path) -> bool:
    state = {"w": torch.zeros(9, 3)}
    with tte.integrations.installed():
        dcp.load(state, checkpoint_id=path)
    return torch.equal(state["w"], torch.arange(27.0).view(9, 3))


def test_nine_rows_on_four_by_two(run_world: Callable[..., Any], tmp_path: Path) -> None:
    assert run_world(8, nine_rows, tmp_path / "ours", True) == ["equal"] * 8
    assert run_world(2, load_whole, tmp_path / "ours") == [True, True]
    # Stock gives a rank another's row, and no other mesh can load it at all.
    assert "wrong" in run_world(8, nine_rows, tmp_path / "stock", False)
    with pytest.raises(CheckpointException, match="mismatch sizes"):
        dcp.load({"w": torch.zeros(9, 3)}, checkpoint_id=tmp_path / "stock", no_dist=True)


class OwnSavePlanner(DefaultSavePlanner):
    pass


class OwnLoadPlanner(DefaultLoadPlanner):
    pass


class OwnWriter(FileSystemWriter):
    pass


class OwnReader(FileSystemReader):
    pass


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The planners and storage of ours that a save or load has set up."""
    used: list[Any] = []
    for ours, method in (
        (tte.SavePlanner, "set_up_planner"),
        (tte.LoadPlanner, "set_up_planner"),
        (tte.FileWriter, "set_up_storage_writer"),
        (tte.FileReader, "set_up_storage_reader"),
    ):
        original = getattr(ours, method)

        def watched(self: Any, *args: Any, original: Any = original, storage_meta: Any = None, **kwargs: Any) -> Any:
            used.append(self)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(ours, method, watched)
    return used


def kinds(users: list[Any]) -> list[str]:
    names = [type(user).__name__ for user in users]
    users.clear()
    return names


OURS_IN_SAVE = ["SavePlanner", "FileWriter"]
OURS_IN_LOAD = ["LoadPlanner", "FileReader"]


def test_what_is_replaced_and_what_is_left_alone(users: list[Any], tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "step": 3}
    tte.install()
    plain_save(state, tmp_path / "0")
    assert kinds(users) == OURS_IN_SAVE
    plain_save(state, tmp_path / "1", planner=DefaultSavePlanner(), storage_writer=FileSystemWriter(tmp_path))
    assert kinds(users) == OURS_IN_SAVE
    plain_save(state, tmp_path / "2", planner=OwnSavePlanner(), storage_writer=OwnWriter(tmp_path))
    assert kinds(users) == []
    many_files = FileSystemWriter(tmp_path, single_file_per_rank=False)
    plain_save(state, tmp_path / "3", storage_writer=many_files)
    assert kinds(users) == ["SavePlanner"]
    assert outcome(state, tmp_path / "0") == "equal"
    assert kinds(users) == OURS_IN_LOAD
    reader = FileSystemReader(tmp_path / "1")
    assert outcome(state, tmp_path / "1", planner=DefaultLoadPlanner(), storage_reader=reader) == "equal"
    assert kinds(users) == OURS_IN_LOAD
    assert outcome(state, tmp_path / "2", planner=OwnLoadPlanner(), storage_reader=OwnReader(tmp_path)) == "equal"
    assert kinds(users) == []
    tte.install(storage=False)
    plain_save(state, tmp_path / "4")
    assert kinds(users) == ["SavePlanner"]
    tte.install(planners=False)
    assert outcome(state, tmp_path / "4") == "equal"
    assert kinds(users) == ["FileReader"]
    assert state_dict_loader._load_state_dict_from_keys({"step"}, checkpoint_id=tmp_path / "0") == {"step": 3}
    format_utils.dcp_to_torch_save(tmp_path / "0", tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["w"], state["w"])
    assert kinds(users) == []


def test_options_are_carried_over(users: list[Any], tmp_path: Path) -> None:
    state = {"a": {"w": torch.arange(3.0)}, "step": 3}
    with tte.integrations.installed(replicas="first", verify="all", cast="allow"):
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        writer = FileSystemWriter(tmp_path / "0", sync_files=False, thread_count=2, overwrite=False)
        dcp.save(state, planner=planner, storage_writer=writer, no_dist=True)
        ours, files = users
        assert not ours.flatten_state_dict and ours.dedup_save_to_lowest_rank
        assert ours._replicas == "first"
        assert (files.path, files.sync, files.thread_count, files.overwrite) == (tmp_path / "0", False, 2, False)
        users.clear()
        with pytest.raises(CheckpointException, match="has a checkpoint; pass overwrite=True"):
            dcp.save(state, storage_writer=writer, no_dist=True)
        dcp.save(state, checkpoint_id=tmp_path / "1", no_dist=True)
        users.clear()
        target = {"a": {"w": torch.zeros(3), "more": torch.ones(1)}, "step": 0}
        dcp.load(
            target, checkpoint_id=tmp_path / "1", planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True
        )
        assert torch.equal(target["a"]["w"], state["a"]["w"]) and target["step"] == 3
        ours, files = users
        assert ours.allow_partial_load and ours.flatten_state_dict and ours._cast == "allow" and files.verify == "all"


def test_names_imported_earlier_and_deprecated_ones(users: list[Any], tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    with tte.integrations.installed():
        save(state, checkpoint_id=tmp_path / "0", no_dist=True)
        load(state, checkpoint_id=tmp_path / "0", no_dist=True)
        assert kinds(users) == OURS_IN_SAVE + OURS_IN_LOAD
        dcp.save_state_dict(state, FileSystemWriter(tmp_path / "1"), no_dist=True)
        dcp.load_state_dict(state, FileSystemReader(tmp_path / "1"), no_dist=True)
        assert kinds(users) == OURS_IN_SAVE + OURS_IN_LOAD
    save(state, checkpoint_id=tmp_path / "2", no_dist=True)
    assert kinds(users) == []


def test_twice_and_nested(users: list[Any], tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}

    def used() -> list[str]:
        plain_save(state, tmp_path / "step")
        return kinds(users)

    tte.integrations.uninstall()
    tte.install()
    tte.install(storage=False)
    assert used() == ["SavePlanner"]
    with tte.integrations.installed(planners=False):
        assert used() == ["FileWriter"]
        with tte.integrations.installed():
            tte.integrations.uninstall()
            assert used() == OURS_IN_SAVE
        assert used() == ["FileWriter"]
    assert is_stock() and used() == []
    with pytest.raises(ZeroDivisionError), tte.integrations.installed():
        1 / 0  # noqa: B018
    assert is_stock()


def test_threads_that_enter_and_leave_in_any_order(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    errors: list[BaseException] = []

    def enter(own: Path, is_last: bool) -> None:
        try:
            for _ in range(20):
                with tte.integrations.installed():
                    both.wait(60)
                    assert not is_stock()
                    plain_save({"w": torch.ones(2)}, own)
                    assert is_native(own)
                    if is_last:
                        both.wait(60)
                if not is_last:
                    assert not is_stock()
                    both.wait(60)
                both.wait(60)
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=enter, args=(tmp_path / str(last), last)) for last in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and is_stock()


def save_in_child(path: Path) -> None:
    assert not is_stock()
    plain_save({"w": torch.ones(2)}, path)
    tte.integrations.uninstall()
    assert is_stock()


def test_a_fork_has_its_own(tmp_path: Path) -> None:
    tte.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = multiprocessing.get_context("fork").Process(target=save_in_child, args=(tmp_path / "step",))
        child.start()
    child.join(120)
    assert child.exitcode == 0 and is_native(tmp_path / "step") and not is_stock()


def test_what_was_replaced_is_logged_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, "torchtitan_ext.integrations.install"), tte.integrations.installed():
        for step in range(2):
            plain_save({"w": torch.ones(2)}, tmp_path / str(step))
    assert [record.message for record in caplog.records] == [
        "torchtitan_ext: SavePlanner takes the place of DefaultSavePlanner",
        "torchtitan_ext: FileWriter takes the place of FileSystemWriter",
    ]


def test_a_function_that_somebody_has_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(*args: Any, **kwargs: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(state_dict_loader, "_load_state_dict", patched)
        with pytest.raises(CannotInstallError, match=r"_load_state_dict was patched by .*patched before") as caught:
            tte.install()
        assert "\n" not in str(caught.value)
        with pytest.raises(CannotInstallError), tte.integrations.installed():
            pass
        assert state_dict_saver._save_state_dict is STOCK[state_dict_saver, "_save_state_dict"]


@pytest.mark.parametrize("patched", [mock.Mock(), functools.partial(print)], ids=["mock", "partial"])
def test_what_is_no_function_was_patched_too(monkeypatch: pytest.MonkeyPatch, patched: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_loader, "_load_state_dict", patched)
        with pytest.raises(CannotInstallError, match="_load_state_dict was patched by "):
            tte.install()


def test_ours_that_somebody_puts_back_later_is_taken_again(tmp_path: Path) -> None:
    tte.install()
    ours = state_dict_saver._save_state_dict
    state_dict_saver._save_state_dict = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    tte.integrations.uninstall()
    state_dict_saver._save_state_dict = ours
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "stock")
    with tte.integrations.installed():
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ours")
    assert not is_native(tmp_path / "stock") and is_native(tmp_path / "ours")


def test_wrong_arguments_are_those_of_stock(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (({},), {}),
        (({}, writer, None, 0, True, None, True, 8), {}),
        (({}, writer), {"storage_writer": writer}),
        (({}, writer), {"no_such": 1}),
    ]
    with tte.integrations.installed():
        for args, kwargs in calls:
            with pytest.raises(TypeError):
                state_dict_saver._save_state_dict(*args, **kwargs)


def test_who_patches_after_us_keeps_it(users: list[Any], tmp_path: Path) -> None:
    tte.install()
    ours = state_dict_saver._save_state_dict

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    state_dict_saver._save_state_dict = theirs
    try:
        tte.integrations.uninstall()
        assert state_dict_saver._save_state_dict is theirs
        plain_save({"w": torch.ones(2)}, tmp_path / "step")
        assert kinds(users) == []
    finally:
        state_dict_saver._save_state_dict = STOCK[state_dict_saver, "_save_state_dict"]


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(state_dict_saver, "_save_state_dict")
        with pytest.raises(CannotInstallError, match="has no function .*_save_state_dict"):
            tte.install()
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_saver, "_save_state_dict", state_dict_saver.save)
        with pytest.raises(CannotInstallError, match=r"has another .*_save_state_dict\(state_dict, "):
            tte.install()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"install: got the option\(s\) replica, expected some of .*replicas"):
        tte.install(replica="first")
    with pytest.raises(ValueError, match="got replicas='second'"):
        tte.install(replicas="second")


def test_saves_of_single_ranks_keep_stocks_writer(tmp_path: Path) -> None:
    with tte.integrations.installed():
        dcp.save({"w": torch.arange(9.0)}, checkpoint_id=tmp_path, no_dist=True, use_collectives=False)
    assert (tmp_path / "__0.metadata").exists() and not list(tmp_path.glob("*.tte_index*"))


@pytest.mark.filterwarnings("ignore:.*is overwritten")
def test_a_run_that_is_set_back(tmp_path: Path) -> None:
    def save(step: int) -> None:
        dcp.save({"step": step}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)

    with tte.integrations.installed():
        save(1)
        save(5)
    with tte.integrations.installed(), pytest.warns(UserWarning, match="the run goes on with step 3"):
        dcp.load({"step": 0}, checkpoint_id=tmp_path / "step-1", no_dist=True)
        save(3)
    assert tte.latest(tmp_path) == tmp_path / "step-3"


def save_asynchronously(rank: int, world_size: int, path: Path, kind: AsyncCheckpointerType) -> None:
    try:
        for step, options in enumerate(({}, {"planner": DefaultSavePlanner()})):
            # What a save was begun with counts, though it may be written after the end of the with.
            with tte.integrations.installed():
                future = dcp.async_save(
                    {"w": torch.arange(9.0)}, checkpoint_id=path / str(step), async_checkpointer_type=kind, **options
                )
            getattr(future, "upload_completion", future).result()
    finally:
        dist.barrier()
        kept = _async_process_executor._CHECKPOINT_PROCESS
        _async_process_executor._CHECKPOINT_PROCESS = None
        if kept is not None:
            kept._save_process.kill()


# A process imports torch anew, which takes seconds.
IN_A_PROCESS = pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.sampled(0.5, "child processes"))
KINDS = [AsyncCheckpointerType.THREAD, IN_A_PROCESS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_asynchronous_saves(run_world: Callable[..., Any], tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    run_world(2, save_asynchronously, tmp_path, kind)
    for step in ("0", "1"):
        assert is_native(tmp_path / step)
        entry = FileSystemReader(tmp_path / step).read_metadata().planner_data
        assert any("torchtitan_ext" in str(key) for key in entry), "made by our planner"
        assert outcome({"w": torch.arange(9.0)}, tmp_path / step) == "equal"


def never_overwrite(init: Any) -> Any:
    def __init__(self: Any, *args: Any, overwrite: bool = False, **kwargs: Any) -> None:
        init(self, *args, overwrite=overwrite, **kwargs)

    return __init__


def test_a_torch_that_overwrites_only_when_asked_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP has announced that ``overwrite`` will be False by default."""
    state = {"w": torch.arange(9.0)}
    with tte.integrations.installed():
        dcp.save(state, checkpoint_id=tmp_path / "0", no_dist=True)
        dcp.save(state, checkpoint_id=tmp_path / "0", no_dist=True)
        monkeypatch.setattr(FileSystemWriter, "__init__", never_overwrite(FileSystemWriter.__init__))
        for save in (dcp.save, lambda *args, **options: dcp.async_save(*args, **options).result()):
            with pytest.raises(BaseException, match="Checkpoint already exists|has a checkpoint"):
                save(state, checkpoint_id=tmp_path / "0", no_dist=True)
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "0", overwrite=True), no_dist=True)


SCRIPT = """
import sys
import torch
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dcp.save({"w": torch.ones(2)}, checkpoint_id=sys.argv[1], no_dist=True)
    print("saved", sys.argv[1:])
"""


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("form", ["script", "module"])
def test_run_installs_for_a_script(tmp_path: Path, form: str) -> None:
    script = tmp_path / "plain_script.py"
    script.write_text(SCRIPT)
    what = [str(script)] if form == "script" else ["-m", "plain_script"]
    command = [sys.executable, "-m", "torchtitan_ext.run", *what, str(tmp_path / "step"), "--more"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "saved" in done.stdout and "--more" in done.stdout and is_native(tmp_path / "step")


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("flags", [[], ["-P"]] if sys.version_info >= (3, 11) else [[]], ids=" ".join)
def test_a_script_that_is_run_finds_the_modules_that_it_finds_alone(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text("import sys; print(*sys.path)")
    link = tmp_path / "link.py"
    link.symlink_to(tmp_path / "real" / "script.py")
    found = []
    for how in ([], ["-m", "torchtitan_ext.run"]):
        command = [sys.executable, *flags, *how, str(link)]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "first")}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(done.stdout)
    assert found[0] == found[1]


def test_run_says_how_it_is_called() -> None:
    command = [sys.executable, "-m", "torchtitan_ext.run", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("usage: python -m torchtitan_ext.run")
