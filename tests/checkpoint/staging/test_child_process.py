"""The child process in which a save may go on: it calls functions, and ends when its parent does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.checkpoint.staging.child_process import ChildProcess
from torchtitan_ext.errors import DamagedCheckpointError, WrongValueError


@pytest.fixture(scope="module")
def child() -> Iterator[ChildProcess]:
    process = ChildProcess()
    yield process
    process.close()


class KeywordError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def fail(kind: str) -> None:
    if kind == "own":
        raise DamagedCheckpointError("a place", "a reason")
    if kind == "keywords":
        raise KeywordError(code=3)
    os.kill(os.getpid(), signal.SIGKILL)


def length_of(text: str, file: int) -> tuple[str, int]:
    size = os.fstat(file).st_size
    os.close(file)
    return text, size


def test_functions_are_called_in_another_process(child: ChildProcess, tmp_path: Path) -> None:
    pid = child.call(os.getpid)
    assert pid != os.getpid() and child.call(os.getppid) == os.getpid()
    (tmp_path / "file").write_bytes(b"12345")
    with (tmp_path / "file").open("rb") as file:
        assert child.call(length_of, "text", file=file) == ("text", 5)
    assert child.call(os.getpid) == pid


def test_errors_come_back_as_they_are_where_they_can(child: ChildProcess) -> None:
    with pytest.raises(DamagedCheckpointError, match="a place"):
        child.call(fail, "own")
    with pytest.raises(RuntimeError, match="KeywordError: code 3"):
        child.call(fail, "keywords")
    with pytest.raises(TypeError):
        child.call(fail)  # type: ignore[arg-type]
    assert child.is_alive


@pytest.mark.usefixtures("warm_children")
def test_a_death_is_an_error() -> None:
    process = ChildProcess()
    with pytest.raises(RuntimeError, match=r"the process that saves for this rank died \(exit code -9\)"):
        process.call(fail, "death")
    with pytest.raises(RuntimeError, match="died"):
        process.call(os.getpid)
    assert not process.is_alive
    process.close()


PARENT = """
import sys, time, torch
import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager

if __name__ == "__main__":
    stager = CpuStager(process=True)
    tte.async_save({"w": torch.ones(9)}, sys.argv[1], stager=stager).result()
    print(stager.child()._process.pid, flush=True)
    if sys.argv[2] == "waits":
        time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("end", ["waits", "ends"])
def test_a_child_ends_with_its_parent(tmp_path: Path, end: str) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "step"), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end == "waits":
            assert is_running(pid)
            parent.kill()
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
    state = {"w": torch.zeros(9)}
    tte.load(state, tmp_path / "step")
    assert state["w"].sum() == 9


def test_a_signal_to_all_processes_of_a_job_leaves_the_child_alone(tmp_path: Path) -> None:
    """torchrun and Slurm send it to the child too, while the trainer goes on to its last save."""
    stager = CpuStager(process=True)
    state = {"w": torch.ones(9)}
    tte.async_save(state, tmp_path / "first", stager=stager).result()
    pid = stager.child()._process.pid
    subprocess.run(["sh", "-c", f"kill -TERM {pid}; kill -USR1 {pid}; kill -INT {pid}"], check=True)
    time.sleep(0.5)
    assert stager.child()._process.pid == pid
    tte.async_save(state, tmp_path / "second", stager=stager).result()
    assert is_running(pid or 0)
    stager.child()._process.terminate()  # as the end of the trainer does
    stager.child()._process.join(60)
    assert not is_running(pid or 0)
    stager.close()


def proportional_bytes(pid: int) -> int:
    """The memory of a process, of which what it shares is divided by the number of processes that map it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def test_the_copy_is_there_once(tmp_path: Path) -> None:
    state = {f"w{index}": torch.ones(1 << 20) for index in range(48)}  # 192 MiB
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    stager = CpuStager(process=True)
    tte.async_save({"w": torch.ones(1)}, tmp_path / "first", stager=stager).result()
    pids = [os.getpid(), stager.child()._process.pid or 0]
    before = sum(map(proportional_bytes, pids))
    most = 0
    saved = tte.async_save(state, tmp_path / "step", stager=stager)
    while not saved.done():
        most = max(most, sum(map(proportional_bytes, pids)) - before)
    assert saved.result().num_bytes >= num_bytes
    stager.close()
    assert 0.5 * num_bytes < most < 1.3 * num_bytes


@pytest.mark.usefixtures("warm_children")
def test_a_state_that_no_process_can_read_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    stager = CpuStager(process=True)
    with pytest.raises(Exception, match="pickle"):
        tte.async_save({"w": lambda: None}, tmp_path / "step", stager=stager)
    stager.close()
    assert not (tmp_path / "step").exists()


@pytest.mark.usefixtures("warm_children")
def test_one_save_in_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state: dict[str, Any] = {"w": torch.arange(9.0)[::2], "empty": torch.empty(0, 3), "step": 3}
    saved = tte.async_save(state, tmp_path / "step", process=True)
    state["w"].zero_()
    saved.result()
    assert "Warning" not in capfd.readouterr().err
    loaded: dict[str, Any] = {"w": torch.ones(5), "empty": torch.empty(0, 3), "step": 0}
    tte.load(loaded, tmp_path / "step")
    assert loaded["w"].tolist() == [0, 2, 4, 6, 8] and loaded["step"] == 3
    with pytest.raises(WrongValueError, match="got process=True and a stager"):
        tte.async_save(state, tmp_path / "step", process=True, stager=CpuStager())


@pytest.mark.usefixtures("warm_children")
def test_saves_without_a_process_group_take_turns_in_the_child(tmp_path: Path) -> None:
    stager = CpuStager(process=True, num_buffers=3)
    saving = [tte.async_save({"w": torch.full((9,), step)}, tmp_path / str(step), stager=stager) for step in range(3)]
    assert [saved.result(timeout=60).path for saved in saving] == [str(tmp_path / str(step)) for step in range(3)]
    stager.close()


def num_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("torchtitan_ext staging")


@pytest.mark.usefixtures("warm_children")
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("state", [{"w": torch.ones(9)}, {"w": torch.ones(9), "m": torch.ones(9, device="meta")}])
def test_an_idle_child_holds_no_memory_of_its_parent(tmp_path: Path, state: dict[str, Any]) -> None:
    stager = CpuStager(process=True)
    tte.async_save(state, tmp_path / "step", stager=stager, planner=DefaultSavePlanner()).exception()
    pid = stager.child()._process.pid or 0
    deadline = time.monotonic() + 20
    while num_mappings(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert num_mappings(pid) == 0
    stager.close()


@pytest.mark.usefixtures("warm_children")
def test_a_relative_path_is_that_of_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = CpuStager(process=True)
    stager.child()
    monkeypatch.chdir(tmp_path)
    tte.async_save({"w": torch.ones(9)}, storage_writer=FileSystemWriter("step"), stager=stager).result()
    stager.close()
    assert (tmp_path / "step" / ".metadata").exists()
