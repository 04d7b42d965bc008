"""What saves, loads and syncs log, and the metrics on their records."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import torchtitan_ext as tte
from torchtitan_ext.metrics import MetricsHandler

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "observability.md"
LOGGER = logging.getLogger("torchtitan_ext")


@contextmanager
def heard() -> Iterator[list[dict[str, Any]]]:
    """The metrics of what happens inside."""
    metrics: list[dict[str, Any]] = []
    handler = MetricsHandler(metrics.append)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    LOGGER.addHandler(handler)
    try:
        yield metrics
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def save_load_and_sync(rank: int, world_size: int, path: Path) -> tuple[int, list[dict[str, Any]]]:
    mesh: DeviceMesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])}
    with heard() as metrics:
        num_bytes = tte.save(state, path).num_bytes
        tte.load(state, path)
        tte.async_save(state, path).result()
        tte.sync_module_states(torch.nn.Linear(4, 4), mesh, verify=True)
        tte.sync.broadcast_tensors([torch.ones(4)])
    return num_bytes, metrics


def test_the_first_rank_logs_each_operation_once(run_world: Callable[..., Any], tmp_path: Path) -> None:
    (num_bytes, metrics), (_, others) = run_world(2, save_load_and_sync, tmp_path / "step")
    assert others == []
    saved, loaded, saved_in_thread, synced, sent = metrics
    assert [one["operation"] for one in metrics] == [
        "save",
        "load",
        "save",
        "sync_module_states",
        "broadcast_tensors",
    ]
    assert [list(one["phase_seconds"]) for one in metrics] == [
        ["prepare", "plan", "write"],
        ["prepare", "plan", "read values", "read", "verify", "take"],
        ["prepare", "stage", "connect", "plan", "write"],
        ["agree", "send", "verify"],
        ["agree", "send"],
    ]
    assert saved["path"] == loaded["path"] == str(tmp_path / "step")
    assert saved["bytes"] == num_bytes
    assert loaded["bytes"] == 64 * 4  # of both ranks
    assert (synced["bytes"], sent["bytes"]) == (20 * 4, 16)
    for one in metrics:
        assert one["ranks"] == 2 and one["retries"] == 0
        assert one["seconds"] == pytest.approx(sum(one["phase_seconds"].values()))
        assert one["gb_per_second"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
    assert saved_in_thread["bytes"] > 0


def test_the_line_says_it_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchtitan_ext"):
        tte.save({"w": torch.zeros(1000)}, tmp_path / "step")
    pattern = r"save of \S+step: [\d,]+ bytes by 1 rank in \d+.\d\d s, \S+ GB/s \(prepare .*, plan .*, write .*\)"
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(pattern, line)


def test_a_load_that_begins_anew_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step"
    tte.save({"w": torch.zeros(4)}, path)
    set_up = tte.FileReader.set_up_storage_reader
    saves = iter([torch.ones(4)])

    def set_up_after_a_save(reader: tte.FileReader, *args: Any, **kwargs: Any) -> None:
        for value in saves:
            with pytest.warns(UserWarning, match="is overwritten"):
                tte.save({"w": value}, path)
        set_up(reader, *args, **kwargs)

    monkeypatch.setattr(tte.FileReader, "set_up_storage_reader", set_up_after_a_save)
    state = {"w": torch.full((4,), 7.0)}
    with heard() as metrics:
        tte.load(state, path)
    assert [(one["operation"], one["retries"]) for one in metrics] == [("save", 0), ("load", 1)]
    assert state["w"].tolist() == [1.0] * 4


def test_a_callback_that_raises_harms_no_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(metrics: dict[str, Any]) -> None:
        raise ValueError("no network")

    handler = MetricsHandler(fail)
    with heard() as metrics:
        LOGGER.addHandler(handler)
        try:
            tte.save({"w": torch.zeros(4)}, tmp_path / "step")
        finally:
            LOGGER.removeHandler(handler)
    assert len(metrics) == 1
    assert "ValueError: no network" in capsys.readouterr().err


class FailingHandler(logging.Handler):
    """Somebody's handler that lets its errors through."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space for the log")


OPERATIONS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "save": tte.save,
    "async_save": lambda state, path: tte.async_save(state, path).result(),
    "load": tte.load,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_handler_that_raises_does_not_make_an_operation_fail_after_its_end(
    operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tte.save({"w": torch.ones(4)}, tmp_path / "step")
    state = {"w": torch.full((4,), 7.0)}
    handler = FailingHandler()
    with heard():
        LOGGER.addHandler(handler)
        try:
            OPERATIONS[operation](state, tmp_path / ("step" if operation == "load" else "other"))
        finally:
            LOGGER.removeHandler(handler)
    assert "OSError: no space for the log" in capsys.readouterr().err
    loaded = {"w": torch.zeros(4)}
    tte.load(loaded, tmp_path / ("step" if operation == "load" else "other"))
    assert loaded["w"].tolist() == state["w"].tolist()


def test_other_records_have_no_metrics() -> None:
    with heard() as metrics:
        logging.getLogger("torchtitan_ext.storage").info("something else")
    assert metrics == []


def test_nothing_is_printed_by_default(tmp_path: Path) -> None:
    code = (
        "import torch, torchtitan_ext as tte; state = {'w': torch.ones(4)}; "
        f"path = {str(tmp_path / 'step')!r}; tte.save(state, path); tte.load(state, path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_examples_of_the_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    wandb = ModuleType("wandb")
    monkeypatch.setattr(wandb, "log", logged.append, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    state = {"w": torch.zeros(4)}
    names: dict[str, Any] = {"tte": tte, "state": state}
    monkeypatch.chdir(tmp_path)
    try:
        exec(example, names)
        tte.save(state, "run/step-100")
        tte.load(state, "run/step-100")
    finally:
        LOGGER.setLevel(level)
        LOGGER.handlers[:] = handlers
    assert set(logged[0]) == {"save/prepare", "save/plan", "save/write", "save/seconds", "save/GB/s"}
    assert {"load/seconds", "load/GB/s"} <= set(logged[-1])
